"""The end of a run: what came out of it, over all replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from farflung.config import Config
from farflung.files import write_text
from farflung.networks import Group, Network, PeerLost, Traffic, among_the_living
from farflung.outer.fragments import split
from farflung.training import checkpoint
from farflung.training.gather import gather
from farflung.training.layouts import buffer_names
from farflung.training.terminal import say
from farflung.training.trainer import Trainer


class NoRoom(RuntimeError):
    """What came out of a run could not be written, for as long as it was tried."""


TRY_EVERY_SECONDS = 5.0
TRY_FOR_SECONDS = 3600.0
"""What cannot be written at the end is tried again, every so often, and for so long."""

PATIENCE = 10
"""The end waits this many times the deadline: replicas that never met may be far apart in time."""

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 256


def finish(
    trainer: Trainer, writes: Callable[[Group], bool], tells: bool, network: Network | None = None
) -> dict[str, Any]:
    """Averages the replicas' weights, or late averages of them, once, evaluates them, and returns the run's summary.

    Leaves the averaged weights in the trainer's model. Where `writes` holds of those that end together, which all
    processes of a replica are told alike, the averaged weights go to the run folder; the summary does from the process
    that `tells`. `network` is that of the replicas that end together, if it is not the one they trained on. Raises
    NoRoom, when the disk stays full, and PeerLost.
    """
    config, network = trainer.config, network or trainer.network
    deadline = PATIENCE * config.deadline
    traffic = Traffic(**vars(trainer.network.traffic))
    seconds = trainer.events.elapsed()
    own_loss = trainer.validation_loss()
    trainer.late.apply()

    island = trainer.island
    (weights,) = split(trainer.model, 1)
    own = weights.read()
    mean = among_the_living(
        network, lambda group: network.all_reduce(own.clone(), group, f"average at the end of {group}").wait(deadline)
    )
    weights.write(mean)
    island.after_step()
    own_facts = [own.numel(), (own - mean).double().square().sum(), traffic.bytes_sent, traffic.seconds_blocked]
    own_facts += [island.traffic.bytes_sent]
    numel, deviation, sent, blocked, boundary = island.total(torch.tensor(own_facts, dtype=torch.float64)).tolist()
    facts = {
        "loss": own_loss,
        "deviation": deviation / max(numel, 1),
        "sent": round(sent),
        "boundary": round(boundary),
        "blocked": blocked / island.layout.island,
        "rounds": trainer.rounds,
        "seconds": seconds,
        "trained": trainer.trained,
    }
    of = gather(network, facts, "summary", deadline)
    all_facts = list(of.values())
    trainer.prune()
    summary = {
        "method": config.method,
        "replicas": config.replicas,
        "missing": [replica for replica in range(config.replicas) if replica not in of],
        "steps": trainer.step,
        "stages": island.layout.stages,
        "shards": island.layout.shards,
        "parameters": round(numel),
        "tokens": sum(f["trained"] for f in all_facts) * config.tokens_per_step,
        "validation_loss": sum(f["loss"] for f in all_facts) / len(all_facts),
        "validation_loss_per_replica": [f["loss"] for f in all_facts],
        "validation_loss_averaged": trainer.validation_loss(),
        "bytes_sent": sum(f["sent"] for f in all_facts),
        "boundary_bytes": sum(f["boundary"] for f in all_facts),
        "ddp_bytes": ddp_bytes(round(numel), config, len(of)),
        "rounds": max(f["rounds"] for f in all_facts),
        "seconds": max(f["seconds"] for f in all_facts),
        "seconds_blocked": sum(f["blocked"] for f in all_facts) / len(all_facts),
        "weight_spread": (sum(f["deviation"] for f in all_facts) / len(all_facts)) ** 0.5,
    }
    if writes(tuple(of)):
        summary["sample"] = sample_text(trainer)
        model = trainer.model
        average = {"shard": island.place.shard, "model": model.state_dict(), "buffers": buffer_names(model)}

        def write() -> None:
            if tells:
                write_text(trainer.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
            checkpoint.write(checkpoint.average_of(trainer.folder, trainer.seat), average)

        _keep_trying(write, trainer, summary)
    return summary


class Endings:
    """The ends of a simulated run: one for each side of a partition. The largest side's, or else the first, stays."""

    def __init__(self) -> None:
        self._largest = 0

    def finish(self, trainer: Trainer) -> None:
        """As `finish`, but a replica that comes when the others have gone only says so. Raises NoRoom and PeerLost."""
        try:
            finish(trainer, lambda ended: trainer.network.rank == ended[0] and self._stays(ended), tells=True)
        except PeerLost as lost:
            if not self._largest:
                raise
            trainer.warn(f"ended without the others: {lost}")

    def _stays(self, ended: Group) -> bool:
        before, self._largest = self._largest, max(self._largest, len(ended))
        return len(ended) > before


def _keep_trying(write: Callable[[], None], trainer: Trainer, summary: dict[str, Any]) -> None:
    """Writes, if need be once there is room on the disk; the user, who may make some, is told the summary meanwhile."""
    ends = time.monotonic() + TRY_FOR_SECONDS
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            fault = f"cannot write to {trainer.folder}: {error.strerror}"
            if time.monotonic() > ends or trainer.stop.requested:
                raise NoRoom(f"{fault}; the summary is: {json.dumps(summary)}") from error
        if not told:
            say(
                f"{fault}; make room: it is tried again for {TRY_FOR_SECONDS / 60:g} minutes, unless you press Ctrl-C. "
                f"The summary is: {json.dumps(summary)}"
            )
            told = True
        time.sleep(TRY_EVERY_SECONDS)


def ddp_bytes(parameters: int, config: Config, count: int) -> int:
    """What float32 gradients averaged every step would have cost so many of N replicas: 2 (N - 1) / N messages each."""
    return 4 * parameters * 2 * (config.replicas - 1) * config.steps * count // config.replicas


def sample_text(trainer: Trainer) -> str:
    """How the trained model continues the beginning of a held-out sequence."""
    length = min(SAMPLE_TOKENS, trainer.config.sequence_length)
    prompt = trainer.held_out[:1, : min(PROMPT_TOKENS, length // 2)]
    return trainer.tokenizer.decode(trainer.island.continued(prompt, length, trainer.tokenizer.end))
