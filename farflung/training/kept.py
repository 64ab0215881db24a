"""Which checkpoints the processes of a run have, so that none is removed that others may resume from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store

from farflung.training.checkpoint import best_of
from farflung.training.stopping import Stop


class Kept:
    """The checkpoints that each process has reported, in a shared store; reports may lag behind.

    A checkpoint is whole when `everyone` has it; the dead are left out. The best one is that of the least validation
    loss, as the mean of what all have told of it.
    """

    def __init__(self, store: Store, everyone: Callable[[], Iterable[int]]) -> None:
        self._store, self._everyone = store, everyone
        self._own: dict[int, dict[int, float | None]] = {}

    def tell(self, process: int, losses: Mapping[int, float | None]) -> None:
        """Says at which steps a process has its part of a checkpoint, and its validation losses there if known."""
        self._own[process] = dict(losses)
        with contextlib.suppress(dist.DistError, RuntimeError):  # others then keep their files for longer
            self._store.set(f"kept/{process}", json.dumps(sorted(self._own[process].items())))

    def add(self, process: int, step: int, loss: float | None) -> None:
        """Says that a process has written one more, with the validation loss at its step if known."""
        self.tell(process, {**self._own[process], step: loss})

    def needed(self, process: int, keep: int) -> tuple[int, int | None]:
        """The step before which a process may remove its own, as all are known to have `keep` newer ones; but the best.

        None where no checkpoint is known to be the best.
        """
        whole = self.whole()
        oldest, best = whole[keep - 1] if len(whole) >= keep else 0, self.best()
        self._own[process] = {step: loss for step, loss in self._own[process].items() if step >= oldest or step == best}
        return oldest, best

    def whole(self) -> list[int]:
        """The steps at which everyone has said to have a checkpoint, newest first; none while that is not known."""
        return sorted(self._together(), reverse=True)

    def best(self) -> int | None:
        """The step of the least validation loss; of several, the last."""
        found = best_of(self._together())
        return None if found is None else found[0]

    def _together(self) -> dict[int, list[float | None]]:
        """What everyone has told of the steps at which all have a checkpoint."""
        keys = [f"kept/{process}" for process in self._everyone()]
        try:
            told = self._store.multi_get(keys) if self._store.check(keys) else [b"[]"]
        except (dist.DistError, RuntimeError):
            return {}
        every = [dict(json.loads(one)) for one in told]
        return {step: [one[step] for one in every] for step in set.intersection(*map(set, every))}


@dataclass(frozen=True)
class Coordination:
    """What the processes of a run agree on: when to stop, and which checkpoints can go."""

    stop: Stop
    kept: Kept
