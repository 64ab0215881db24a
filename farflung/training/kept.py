"""Which checkpoints the processes of a run have, so that none is removed that others may resume from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store

from farflung.training.stopping import Stop


class Kept:
    """The checkpoints that each process has reported, in a shared store; reports may lag behind.

    A checkpoint is whole when `everyone` has it; the dead are left out.
    """

    def __init__(self, store: Store, everyone: Callable[[], Iterable[int]]) -> None:
        self._store, self._everyone = store, everyone
        self._own: dict[int, set[int]] = {}

    def tell(self, process: int, steps: Iterable[int]) -> None:
        """Says at which steps a process has its part of a checkpoint, before it trains."""
        self._own[process] = set(steps)
        with contextlib.suppress(dist.DistError, RuntimeError):  # others then keep their files for longer
            self._store.set(f"kept/{process}", json.dumps(sorted(self._own[process])))

    def add(self, process: int, step: int) -> None:
        """Says that a process has written one more."""
        self.tell(process, {*self._own[process], step})

    def oldest_needed(self, process: int, keep: int) -> int:
        """The step before which a process may remove its own: all are known to have `keep` newer ones."""
        whole = self.whole()
        oldest = whole[keep - 1] if len(whole) >= keep else 0
        self._own[process] = {step for step in self._own[process] if step >= oldest}
        return oldest

    def whole(self) -> list[int]:
        """The steps at which everyone has said to have a checkpoint, newest first; none while that is not known."""
        keys = [f"kept/{process}" for process in self._everyone()]
        try:
            told = self._store.multi_get(keys) if self._store.check(keys) else [b"[]"]
        except (dist.DistError, RuntimeError):
            return []
        return sorted(set.intersection(*(set(json.loads(steps)) for steps in told)), reverse=True)


@dataclass(frozen=True)
class Coordination:
    """What the processes of a run agree on: when to stop, and which checkpoints can go."""

    stop: Stop
    kept: Kept
