"""Whose messages count at a round, and how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

HEAVIEST = 10.0
"""The largest weight in a group, in multiples of the least."""


def with_common_anchors(guests: Iterable[tuple[int, Any, float]]) -> dict[int, float]:
    """The weights of those with the most common anchors, among equals with more work; of ranks, anchors and weights."""
    by_anchors: dict[Any, dict[int, float]] = defaultdict(dict)
    for rank, anchors, weight in guests:
        by_anchors[anchors][rank] = weight
    return max(by_anchors.items(), key=lambda one: (len(one[1]), sum(one[1].values()), one[0]))[1]


def believed(weights: Mapping[int, float]) -> dict[int, float]:
    """Weights of which none is more than HEAVIEST times the least: peers may lie.

    All members find the same, or their anchors would part.
    """
    heaviest = HEAVIEST * max(min((heavy for heavy in weights.values() if heavy > 0), default=0.0), 1.0)
    return {rank: min(heavy, heaviest) for rank, heavy in weights.items()}
