"""Which checkpoints the processes of a run have, so that none is removed that others may resume from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store

from farflung.figure import LOSS, Figure
from farflung.training.checkpoint import best_of
from farflung.training.showing import Shown
from farflung.training.stopping import Stop


class Kept:
    """The checkpoints that each process has reported, in a shared store; reports may lag behind.

    A checkpoint is whole when `everyone` has it; the dead are left out. The best one is that of the best score by
    `figure`, as the mean of what all have told of it.
    """

    def __init__(self, store: Store, everyone: Callable[[], Iterable[int]], figure: Figure = LOSS) -> None:
        self._store, self._everyone, self._figure = store, everyone, figure
        self._own: dict[int, dict[int, float | None]] = {}

    def tell(self, process: int, scores: Mapping[int, float | None]) -> None:
        """Says at which steps a process has its part of a checkpoint, and its scores there if known."""
        self._own[process] = dict(scores)
        with contextlib.suppress(dist.DistError, RuntimeError):  # others then keep their files for longer
            self._store.set(f"kept/{process}", json.dumps(sorted(self._own[process].items())))

    def add(self, process: int, step: int, score: float | None) -> None:
        """Says that a process has written one more, with the score at its step if known."""
        self.tell(process, {**self._own[process], step: score})

    def needed(self, process: int, keep: int) -> tuple[int, int | None]:
        """The step before which a process may remove its own, as all are known to have `keep` newer ones; but the best.

        None where no checkpoint is known to be the best.
        """
        whole = self.whole()
        oldest, best = whole[keep - 1] if len(whole) >= keep else 0, self.best()
        self._own[process] = {
            step: score for step, score in self._own[process].items() if step >= oldest or step == best
        }
        return oldest, best

    def whole(self) -> list[int]:
        """The steps at which everyone has said to have a checkpoint, newest first; none while that is not known."""
        return sorted(self._together(), reverse=True)

    def best(self) -> int | None:
        """The step of the best score; of several, the last."""
        found = best_of(self._together(), self._figure)
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
    shown: Shown | None = None
    """To whom the replica shows what it has, if anybody observes the run."""
