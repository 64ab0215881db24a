"""Which expert gets a sequence, where each has only so many seats."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def balanced_assignment(scores: NDArray[np.floating]) -> NDArray[np.int64]:
    """An expert for each of n sequences, of which no expert gets more than ⌈n / E⌉ (arXiv 2410.03529, algorithm 2).

    The sequence with the best score comes first, and each takes its best expert that has a seat left; of equals, the
    first. Until an expert's last seat is taken, all sequences choose alike: so there are at most E passes.

    Args:
        scores: (n, E), finite, more is better.
    """
    count, experts = scores.shape
    found = np.empty(count, dtype=np.int64)
    seats = np.full(experts, -(-count // experts))
    scores = scores.astype(np.float64)
    waiting = np.argsort(-scores.max(axis=1), kind="stable")
    while len(waiting):
        best = scores[waiting].argmax(axis=1)
        came = np.cumsum(best[:, None] == np.arange(experts), axis=0)
        seated = np.cumprod((came <= seats).all(axis=1)).sum()
        found[waiting[:seated]] = best[:seated]
        seats -= np.bincount(best[:seated], minlength=experts)
        scores[:, seats == 0] = -np.inf
        waiting = waiting[seated:]
    return found


def purity(experts: NDArray[np.int64], sources: NDArray[np.int64]) -> float:
    """The share of sequences that are of the source that most of their expert's are of; both (n,), from 0."""
    return float(table_of(experts, sources).max(axis=1).sum() / len(experts))


def table_of(experts: NDArray[np.int64], sources: NDArray[np.int64]) -> NDArray[np.int64]:
    """(experts, sources): how many sequences of each source each expert has; the most is counted from the numbers."""
    counts = np.zeros((experts.max(initial=0) + 1, sources.max(initial=0) + 1), dtype=np.int64)
    np.add.at(counts, (experts, sources), 1)
    return counts
