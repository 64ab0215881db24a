"""Words that processes leave each other in their process group's store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import Store


class Board:
    """Where a network's replicas leave each other words.

    Args:
        store: shared by all processes.
        processes: the replicas' ranks in the process group, in order.
        process: this one's.
    """

    def __init__(self, store: Store, processes: Sequence[int], process: int) -> None:
        self._store = store
        self._processes = processes
        self._process = process

    def leave(self, topic: str, word: Any) -> None:
        """Leaves a word, which JSON can hold; in vain where the store is gone."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.append(f"words/{topic}", json.dumps([self._process, word]) + "\n")  # type: ignore[attr-defined]

    def words(self, topic: str) -> dict[int, Any]:
        """What replicas have left, by their ranks; nothing where the store is gone."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._store.check([f"words/{topic}"]):
                lines = self._store.get(f"words/{topic}").decode().splitlines()
                told = dict(map(json.loads, lines))
                return {rank: told[process] for rank, process in enumerate(self._processes) if process in told}
        return {}
