"""What a checkpoint of a loop of one's own holds, which of them all replicas have, and which can go."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from farflung.errors import UserError
from farflung.events import CheckpointEvent, events_in
from farflung.outer import Session
from farflung.training import checkpoint, kept
from farflung.training.agreement import all_gather_facts
from farflung.training.checkpoint import Weights


class OwnCheckpoint(Weights):
    """The state that one replica of an own loop resumes from. Its tensors are on the CPU when it is read."""

    optimizers: list[dict[str, Any]]
    """Each inner optimizer's state_dict."""
    outer: dict[str, Any]
    """The state_dict of the rounds."""
    random: dict[str, Any]
    """The state of Python's, numpy's and torch's random numbers."""
    own: dict[str, Any]
    """What the loop itself has given."""
    replicas: int
    """How many replicas there were."""
    counted: int
    """Units that the replica has trained on."""
    traffic: dict[str, float]
    """What was sent and waited for in rounds so far: the fields of Traffic, in bytes, packets and seconds."""
    elapsed: float
    """Seconds since the run began."""
    events_size: int
    """Bytes of the replica's file of events then."""


def plain(value: Any, where: str) -> Any:
    """A value made of dicts, lists, tuples, tensors and numbers alone, which is read without running code.

    Raises UserError for another; `where` says what it is of.
    """
    if isinstance(value, dict):
        return {key: plain(one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return kind(plain(one, f"{where}[{place}]") for place, one in enumerate(value))
    if value is None or isinstance(value, Tensor | bool | int | float | str | bytes | torch.dtype | torch.device):
        return value
    if isinstance(value, np.generic):
        return value.item()
    raise UserError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; give numbers, text, tensors, and lists "
        "or dicts of them, such as its state_dict()"
    )


def random_state() -> dict[str, Any]:
    """The state of all random numbers of this process."""
    numpy: Any = np.random.get_state(legacy=False)
    state = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in numpy["state"].items()}
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": plain({**numpy, "state": state}, "numpy's random numbers"),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Goes on from a `random_state`; GPUs that are not here are left out."""
    torch.set_rng_state(state["torch"])
    for device, saved in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved, device)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def agreed_step(folder: Path, replica: int, stem: str, outer: Session) -> int:
    """The step of the last checkpoint that all replicas have; 0 where the run begins. Raises UserError.

    A replica may have been killed before its first checkpoint was whole, when others had one. One that has lost its
    own, or comes from another machine, is refused.
    """
    steps, network = checkpoint.sound_steps(folder, replica, stem), outer.network
    if network.elastic:
        return max(steps, default=0)
    own = {"steps": steps, "could_have": int(_could_have(folder, replica))}
    told = all_gather_facts(network, own, outer.key("checkpoints"), outer.starting_s)
    common: set[int] = set.intersection(*(set(one["steps"]) for one in told.values()))
    if common:
        return max(common)
    bare = [rank for rank, one in told.items() if not one["steps"]]
    if len(bare) == len(told) or (bare and not any(told[rank]["could_have"] for rank in bare)):
        return 0
    have = "; ".join(f"replica {rank} has {one['steps'] or 'none'}" for rank, one in told.items())
    raise UserError(
        f"the replicas have no checkpoint in common in {folder} ({have}); copy each replica's folder to where it runs "
        "now, or give a new folder to begin again"
    )


def _could_have(folder: Path, replica: int) -> bool:
    """Whether a replica without a checkpoint could have had one: its events tell of one, or there are none."""
    path = folder / "events" / f"replica-{replica}.jsonl"
    if not path.exists():
        return True
    events, _ = events_in(path.read_bytes().rpartition(b"\n")[0], str(path))
    return any(isinstance(event, CheckpointEvent) for event in events)


class Kept:
    """Which checkpoints can go: those older than what all replicas are known to have.

    Processes tell each other through the store that their network has; other replicas are in this process, or alone.
    """

    def __init__(self, folder: Path, outer: Session, keep: int) -> None:
        self._folder, self._outer, self._keep = folder, outer, keep
        store = getattr(outer.network, "store", None)
        named = store and PrefixStore(outer.key("checkpoints"), store)
        self._told = kept.Kept(named, outer.network.members) if named else None

    def tell(self, replica: int) -> None:
        """Says which checkpoints a replica has, before it trains."""
        if self._told:
            self._told.tell(replica, dict.fromkeys(checkpoint.steps_of(self._folder, replica)))

    def add(self, replica: int, step: int) -> None:
        """Says that it has written one more."""
        if self._told:
            self._told.add(replica, step, None)  # a loop of one's own judges where it likes

    def oldest_needed(self, replica: int) -> int:
        """The step before which a replica may remove its own."""
        if self._told:
            return self._told.needed(replica, self._keep)[0]
        everyone = [replica] if self._outer.network.elastic else self._outer.network.members()
        whole = sorted(set.intersection(*(checkpoint.steps_of(self._folder, one) for one in everyone)), reverse=True)
        return whole[self._keep - 1] if len(whole) >= self._keep else 0
