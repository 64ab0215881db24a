"""Words that replicas leave each other, in a store that takes its time."""

from __future__ import annotations

import threading
from typing import Any

from patience import patience
from torch.distributed import HashStore

from farflung.networks.board import Board

SLOW_SECONDS = 0.3


class SlowStore:
    """A store in memory that writes late, and whose answers come late."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.asked = threading.Event()

    def clone(self) -> SlowStore:
        return self

    def append(self, key: str, value: str) -> None:
        threading.Event().wait(SLOW_SECONDS)
        self._store.append(key, value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        told = self._store.get(key)
        self.asked.set()
        threading.Event().wait(SLOW_SECONDS)
        return told


def test_a_word_is_there_when_it_has_been_left_though_the_process_may_end_at_once() -> None:
    store: Any = SlowStore()
    Board(store, [0, 1], 1).leave("end", 3)
    assert store.check(["words/end"])


def test_a_look_that_began_before_a_word_was_left_does_not_hide_it() -> None:
    store: Any = SlowStore()
    one, other = Board(store, [0, 1], 0), Board(store, [0, 1], 1)
    one.leave("end", 3)
    assert other.words("end") == {}
    assert store.asked.wait(patience(5))
    store._store.append("words/end", "[1, 4]\n")
    assert other.words("end", patience(5)) == {0: 3, 1: 4}
