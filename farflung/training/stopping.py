"""Stopping early, all replicas at one step, so that the checkpoint they leave is whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

AGREEMENT_SECONDS = 10.0
"""How long a replica that was told to stop waits for the others' word of being told, too."""


class Stopped(Exception):
    """The run ends before its last step, because it was asked to."""


class Stop:
    """The wish to stop, from a signal, and the replicas' agreement on the step.

    Every replica says in the store which step it is in; the run stops after the furthest of these, which nobody
    has passed. Until then all train on, so no exchange is left without its partner.

    Args:
        store: shared by all replicas.
        everyone: all replicas.
        mine: those of this process.
    """

    def __init__(self, store: Store, everyone: Iterable[int], mine: Iterable[int]) -> None:
        self._store = store
        self._everyone = list(everyone)
        self._steps = dict.fromkeys(mine, 0)
        self._requested = False
        self._last_step: int | None = None
        self._parent = os.getppid()

    def request(self, *_: Any) -> None:
        """Asks to stop; a signal handler."""
        if not self._requested:
            self._requested = True
            for replica, step in self._steps.items():
                self._store.set(f"stop/{replica}", str(step))

    def begin_step(self, replica: int, step: int) -> None:
        """Says which step a replica is in."""
        self._steps[replica] = step

    def due_after(self, step: int) -> bool:
        """Whether this was the last step. Raises Stopped if the others cannot be asked: there is no checkpoint then."""
        if os.getppid() != self._parent:
            raise Stopped("the process that started this replica is gone")
        if not self._requested:
            return False
        if self._last_step is None:
            self._last_step = self._agree()
        return step >= self._last_step

    def _agree(self) -> int:
        keys = [f"stop/{replica}" for replica in self._everyone]
        try:
            self._store.wait(keys, timedelta(seconds=AGREEMENT_SECONDS))
        except (dist.DistError, RuntimeError) as error:
            raise Stopped("not every replica answered, so the last checkpoint is the one before") from error
        return max(int(self._store.get(key)) for key in keys)
