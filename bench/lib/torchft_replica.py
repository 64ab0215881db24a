"""One replica of torchft's DiLoCo that may die: a manager, Gloo, and the state of others that it heals from.

    python -m bench.lib.torchft_replica NUMBER LIGHTHOUSE STEP_MS SETTINGS FOLDER

Keeps the tokens that it has trained on, as of its last synchronization, in FOLDER/NUMBER.json, and its loss at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from bench.lib.contenders import OUTER, Replica
from farflung.files import write_text

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


def manager_of(replica: Replica, outer: torch.optim.Optimizer, store: TCPStore, lighthouse: str) -> Manager:
    """Its manager, which hands the replica's state to others and takes theirs."""
    parts = {"model": replica.model, "inner": replica.optimizer, "outer": outer}

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=LOOPBACK,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica.number}",
        hostname=LOOPBACK,
    )


def main() -> None:
    number, lighthouse, step_ms, settings, folder = sys.argv[1:]
    replica = Replica(json.loads(settings), int(number), LOOPBACK, Path(folder))
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    outer = torch.optim.SGD(replica.model.parameters(), **OUTER)
    manager = manager_of(replica, outer, store, lighthouse)
    path = Path(folder) / f"{number}.json"
    told = json.loads(path.read_text()) if path.exists() else {"tokens": 0}
    a_round = replica.every * replica.config.island.batch_size * replica.config.workload.sequence_length
    with DiLoCo(manager, [replica.model], replica.optimizer, outer, sync_every=replica.every):
        while (step := manager.current_step() * replica.every) < replica.steps:
            for inner in range(replica.every):
                began = time.monotonic()
                replica.backward(step + inner)
                time.sleep(max(0.0, float(step_ms) / 1e3 - (time.monotonic() - began)))
                replica.optimizer.step()
                replica.optimizer.zero_grad()
            reached = manager.current_step() * replica.every  # where it was before, when the synchronization has failed
            told = {"tokens": told["tokens"] + a_round * (reached > step), "step": reached}
            write_text(path, json.dumps(told))
    write_text(path, json.dumps({**told, "loss": replica.validation_loss()}))
    os._exit(0)  # its background threads need not be waited for


if __name__ == "__main__":
    main()
