"""The end of a run: what came out of it, over all replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.config import Config
from farflung.files import write_text
from farflung.networks import Network, PeerLostError, Traffic, among_members
from farflung.outer.fragments import split
from farflung.training import checkpoint
from farflung.training.gather import gather
from farflung.training.layouts import buffer_names
from farflung.training.terminal import say
from farflung.training.trainer import Trainer


class NoRoomError(RuntimeError):
    """What came out of a run could not be written, for as long as it was tried."""


TRY_EVERY_SECONDS = 5.0
TRY_FOR_SECONDS = 3600.0
"""What cannot be written at the end is tried again, every so often, and for so long."""

PATIENCE = 10
"""The end waits this many times the deadline: replicas that never met may be far apart in time."""

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 256


Ended = tuple[Tensor, list[dict[str, Any]]]
"""The mean of the weights of those who end together, and what each of them tells of its run."""
Together = Callable[[Callable[[Network], Ended]], Ended]
"""Calls a function with the network of the replicas that end together; if it fails, perhaps again with that of fewer.
"""


def finish(trainer: Trainer, together: Together) -> dict[str, Any]:
    """Averages the replicas' weights, or late averages of them, once, evaluates them, and returns the run's summary.

    Leaves the averaged weights in the trainer's model. Raises PeerLostError.
    """
    config = trainer.config
    deadline = PATIENCE * config.deadline
    traffic = Traffic(**vars(trainer.network.traffic))
    seconds = trainer.events.elapsed()
    own_loss = trainer.validation_loss()
    trainer.late.apply()

    island = trainer.island
    (weights,) = split(trainer.model, 1)
    own = weights.read()

    def ended(network: Network) -> Ended:
        mean = among_members(
            network,
            lambda group: network.all_reduce(own.clone(), group, f"average at the end of {group}").wait(deadline),
        )
        own_facts = [own.numel(), (own - mean).double().square().sum(), traffic.bytes_sent, traffic.seconds_blocked]
        own_facts += [island.traffic.bytes_sent]
        numel, deviation, sent, blocked, boundary = island.total(torch.tensor(own_facts, dtype=torch.float64)).tolist()
        facts = {
            "replica": island.place.replica,
            "parameters": round(numel),
            "tokens": trainer.trained * config.tokens_per_step,
            "loss": own_loss,
            "deviation": deviation / max(numel, 1),
            "sent": round(sent),
            "boundary": round(boundary),
            "blocked": blocked / island.layout.island,
            "rounds": trainer.rounds,
            "seconds": seconds,
        }
        return mean, list(gather(network, facts, "summary", deadline).values())

    mean, all_facts = together(ended)
    weights.write(mean)
    island.after_step()
    trainer.prune()
    parameters = all_facts[0]["parameters"]
    missing = set(range(config.replicas)) - {f["replica"] for f in all_facts}  # on the internet ranks are other numbers
    return {
        "method": config.method,
        "replicas": config.replicas,
        "missing": sorted(missing) if len(all_facts) < config.replicas else [],
        "steps": trainer.step,
        "stages": island.layout.stages,
        "shards": island.layout.shards,
        "parameters": parameters,
        "tokens": sum(f["tokens"] for f in all_facts),
        "validation_loss": sum(f["loss"] for f in all_facts) / len(all_facts),
        "validation_loss_per_replica": [f["loss"] for f in all_facts],
        "validation_loss_averaged": trainer.validation_loss(),
        "bytes_sent": sum(f["sent"] for f in all_facts),
        "boundary_bytes": sum(f["boundary"] for f in all_facts),
        "ddp_bytes": ddp_bytes(parameters, config, len(all_facts)),
        "rounds": max(f["rounds"] for f in all_facts),
        "seconds": max(f["seconds"] for f in all_facts),
        "seconds_blocked": sum(f["blocked"] for f in all_facts) / len(all_facts),
        "weight_spread": (sum(f["deviation"] for f in all_facts) / len(all_facts)) ** 0.5,
    }


def write_results(trainer: Trainer, summary: dict[str, Any], tells: bool) -> None:
    """Writes the averaged weights, and with `tells` the summary; all processes of a replica call it alike.

    Raises NoRoomError, when the disk stays full.
    """
    summary = {**summary, "sample": sample_text(trainer)}
    model = trainer.model
    average: checkpoint.Weights = {
        "shard": trainer.island.place.shard,
        "model": model.state_dict(),
        "buffers": buffer_names(model),
    }

    def write() -> None:
        if tells:
            write_text(trainer.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        checkpoint.write(checkpoint.average_of(trainer.folder, trainer.seat), average)

    _keep_trying(write, trainer, summary)


class Endings:
    """The ends of a simulated run: one for each side of a partition. The largest side's, or else the first, stays."""

    def __init__(self) -> None:
        self._largest = 0

    def finish(self, trainer: Trainer) -> None:
        """Ends with whom it can reach; a replica that comes when the others have gone only says so.

        Raises NoRoomError and PeerLostError.
        """
        try:
            summary = finish(trainer, lambda ended: ended(trainer.network))
        except PeerLostError as lost:
            if not self._largest:
                raise
            trainer.warn(f"ended without the others: {lost}")
            return
        left = [replica for replica in range(trainer.config.replicas) if replica not in summary["missing"]]
        if trainer.network.rank == left[0] and len(left) > self._largest:
            self._largest = len(left)
            write_results(trainer, summary, tells=True)


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
                raise NoRoomError(f"{fault}; the summary is: {json.dumps(summary)}") from error
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
