"""Words that simulated replicas leave each other; all know them at once, also those who are cut off."""

from __future__ import annotations

from typing import Any


class SimulatedBoard:
    """See Words.

    Args:
        topics: the words of all, by topic and rank, which all replicas share.
        rank: this one's.
    """

    def __init__(self, topics: dict[str, dict[int, Any]], rank: int) -> None:
        self._topics = topics
        self._rank = rank

    def leave(self, topic: str, word: Any) -> None:
        """See Words."""
        self._topics.setdefault(topic, {})[self._rank] = word

    def words(self, topic: str, seconds: float = 0.0) -> dict[int, Any]:
        """See Words."""
        return self._topics.get(topic, {})
