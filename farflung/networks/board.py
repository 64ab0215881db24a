"""Words that processes leave each other in their process group's store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from functools import partial
from threading import Thread
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import Store

from farflung.networks.works import in_thread

LEAVE_SECONDS = 5.0
"""So long a word is waited for that is being left: who ends may do so at once, and the word with it."""


def connected_anew(store: Store) -> Store:
    """Another connection to a store; a store of a user's own that has none is taken itself."""
    try:
        return store.clone()  # type: ignore[attr-defined, no-any-return]
    except RuntimeError:
        return store


class Words(Protocol):
    """Where a network's replicas leave each other words.

    `at_once` says whether all know a word as soon as it is left, and looking takes no time; `tells_of_rounds` whether
    each is to say there which rounds it comes to: where that is so, and members come and go.
    """

    at_once: bool
    tells_of_rounds: bool

    def leave(self, topic: str, word: Any) -> None:
        """Leaves a word, which JSON can hold, in place of the last one."""

    def words(self, topic: str, seconds: float = 0.0) -> dict[int, Any]:
        """What replicas have left, by their ranks, as far as is known within so many seconds."""
        ...


class Board:
    """Where a network's replicas leave each other words; threads write and read them, so that no store holds one up.

    Args:
        store: a connection of its own to what all processes share. It is made at the start: one to a store that is
            gone would be tried for long.
        processes: the replicas' ranks in the process group, in order.
        process: this one's.
    """

    at_once = tells_of_rounds = False

    def __init__(self, store: Store, processes: Sequence[int], process: int) -> None:
        self._store = store
        self._processes = processes
        self._process = process
        self._looks: dict[str, Thread] = {}
        self._known: dict[str, dict[int, Any]] = {}

    def among(self, processes: Sequence[int]) -> Board:
        """The board of a network of some of the processes, with the same connection."""
        return Board(self._store, processes, self._process)

    def leave(self, topic: str, word: Any) -> None:
        """Leaves a word, which JSON can hold; in vain where the store is gone or takes longer than `LEAVE_SECONDS`."""
        in_thread(partial(self._leave, topic, word)).join(LEAVE_SECONDS)

    def words(self, topic: str, seconds: float = 0.0) -> dict[int, Any]:
        """What replicas have left, by their ranks, as far as is known within so many seconds; looks for more."""
        until = time.monotonic() + seconds
        look = self._looks.get(topic)
        if look and seconds:  # it may have begun before the last word was left
            look.join(seconds)
        if look is None or not look.is_alive():
            look = self._looks[topic] = in_thread(partial(self._look, topic))
        look.join(max(0.0, until - time.monotonic()))
        return self._known.get(topic, {})

    def _leave(self, topic: str, word: Any) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._store.append(f"words/{topic}", json.dumps([self._process, word]) + "\n")  # type: ignore[attr-defined]

    def _look(self, topic: str) -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self._store.check([f"words/{topic}"]):
                told = dict(map(json.loads, self._store.get(f"words/{topic}").decode().splitlines()))
                ranks = enumerate(self._processes)
                self._known[topic] = {rank: told[process] for rank, process in ranks if process in told}
