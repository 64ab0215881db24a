"""One shard of a replica whose memory is planned, in a process of its own: `python torch_memory.py MODEL _ OUT`.

It trains some runs, each in a folder of its own in OUT, and leaves their weights and what was refused.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from patience import patience
from torch.distributed import PrefixStore

from farflung.errors import UserError
from farflung.memory.search import MODES
from farflung.networks import TorchNetwork
from farflung.settings import Settings
from farflung.training.kept import Coordination, Kept
from farflung.training.stopping import Stop
from farflung.training.trainer import Trainer

STEPS, HALF = 2, 1
MARK = 12345
"""Bytes of prefetch that no search finds: a plan that has them is the kept one."""


class Runs:
    """Runs of one model, some of them planned."""

    def __init__(self, model: str, out: Path) -> None:
        self.network = TorchNetwork.from_env(starting=patience(60))
        self._out, self._count = out, 0
        self._usual: dict[str, Any] = {"model": model, "sequence_length": 64, "batch_size": 16, "max_tokens": 50_000}
        self._usual |= {"eval_sequences": 2, "method": "local", "network": "torch", "replicas": 1, "inner": "adamw"}
        self._usual |= {"steps": STEPS, "log_every": 1, "warmup": 1, "shard": 2, "tail_average": 0}
        self._usual |= {"checkpoint_every": HALF, "keep_checkpoints": 3}

    def plan(self, name: str) -> Path:
        """This process's plan of a run."""
        return self._out / name / "memory" / f"replica-0-part-{self.network.process}-of-2.json"

    def trained(self, name: str, resume_step: int | None = None, **settings: Any) -> dict[str, Any]:
        """The weights after the last step, or the refusal."""
        self._count += 1
        gc.collect()
        config = Settings.of(**(self._usual | settings))
        store, processes = PrefixStore(f"run {self._count}", self.network.store), range(2)
        stop, kept = Stop(store, processes, [self.network.process]), Kept(store, lambda: processes, config.figure)
        folder = self._out / name
        trainer = Trainer(config, self.network, folder, Coordination(stop, kept), torch.device("cpu"), resume_step)
        refused = ""
        with trainer.stop.listening():
            try:
                trainer.train()
            except UserError as error:
                refused = str(error)
        trainer.log.events.close()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return {"weights": weights, "refused": refused}

    def little(self, parts: int, refused: str, **settings: Any) -> tuple[str, str]:
        """Trains with the memory that was told to be enough; the run's name, and that. A process grows."""
        for turn in range(4):
            (least,) = re.findall(r"give at least ([\d.]+) GB", refused)
            memory, name = f"{least}GB", f"little-{parts}-{turn}"
            if not (refused := self.trained(name, **settings, memory=memory)["refused"]):
                return name, memory
        raise AssertionError(refused)

    def changed(self, name: str, kept: dict[str, Any], **changes: Any) -> None:
        """Keeps a plan for a run, with changes."""
        self.plan(name).parent.mkdir(parents=True, exist_ok=True)
        self.plan(name).write_text(json.dumps(kept | {"plan": kept["plan"] | changes}))


def main(model: str, out: Path) -> dict[str, Any]:
    """What was seen of each run."""
    runs = Runs(model, out)
    seen = {}
    for parts in (1, 2):
        usual = {"microbatches": parts, "far_folder": str(out / "far")}
        seen[f"much {parts}"] = runs.trained(f"much-{parts}", microbatches=parts)
        seen[f"least {parts}"] = runs.trained(f"least-{parts}", **usual, memory="1MB")
        name, usual["memory"] = runs.little(parts, seen[f"least {parts}"]["refused"], **usual)
        kept = json.loads(runs.plan(name).read_text())
        seen[f"kept {parts}"] = kept
        runs.changed(name, kept, prefetch_bytes=MARK)
        seen[f"resumed {parts}"] = runs.trained(name, HALF, **usual)
        seen[f"followed {parts}"] = json.loads(runs.plan(name).read_text())
        modes = zip(cycle(MODES), kept["plan"]["layers"], strict=False)
        layers = [{"mode": mode, "state": "moments-far"} for mode, _ in modes]
        runs.changed(f"all-{parts}", kept, layers=layers, prefetch_bytes=MARK)
        seen[f"all modes {parts}"] = runs.trained(f"all-{parts}", **usual)
        seen[f"all modes, resumed {parts}"] = runs.trained(f"all-{parts}", HALF, **usual)
        seen[f"given {parts}"] = json.loads(runs.plan(f"all-{parts}").read_text())
    roomy = {"microbatches": 1, "memory": "100%"}
    runs.trained("roomy", **roomy)
    runs.changed("roomy", json.loads(runs.plan("roomy").read_text()), prefetch_bytes=MARK)
    if runs.network.process:
        runs.plan("roomy").unlink()
    seen["lost"] = runs.trained("roomy", HALF, **roomy)
    seen["anew"] = json.loads(runs.plan("roomy").read_text())
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    model, _, out = sys.argv[1:4]
    found = main(model, Path(out))
    torch.save(found, Path(out) / f"{torch.distributed.get_rank()}.pt")
