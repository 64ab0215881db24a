"""Words that simulated replicas leave each other; all know them at once, also those who are cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Topics:
    """All words, by topic and rank, and whom a new one wakes who waits for others."""

    def __init__(self) -> None:
        self.words: dict[str, dict[int, Any]] = {}
        self.waiting: list[Callable[[], None]] = []


class SimulatedBoard:
    """See Words.

    Args:
        topics: which all replicas share.
        rank: this one's.
        tells_of_rounds: whether there are cuts or deaths.
    """

    at_once = True

    def __init__(self, topics: Topics, rank: int, tells_of_rounds: bool) -> None:
        self._topics = topics
        self._rank = rank
        self.tells_of_rounds = tells_of_rounds

    def leave(self, topic: str, word: Any) -> None:
        """See Words."""
        self._topics.words.setdefault(topic, {})[self._rank] = word
        for wake in self._topics.waiting:
            wake()

    def words(self, topic: str, seconds: float = 0.0) -> dict[int, Any]:
        """See Words."""
        return self._topics.words.get(topic, {})
