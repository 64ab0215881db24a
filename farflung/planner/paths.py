"""The best matchings of two groups, and the shortest ways through all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

EXACT = 16
"""The most nodes for which the shortest path is found exactly."""


def best_matching(costs: Matrix) -> tuple[float, dict[int, int]]:
    """The perfect matching of rows and columns whose largest cost is least: that cost, and the row of each column."""
    levels = np.unique(costs)
    low = int(np.searchsorted(levels, max(costs.min(0).max(), costs.min(1).max())))
    high = len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _matching(costs <= levels[middle]):
            high = middle
        else:
            low = middle + 1
    return float(levels[low]), _matching(costs <= levels[low])


def _matching(allowed: NDArray[np.bool_]) -> dict[int, int]:
    """The row of each column, if every row finds a column of its own (Kuhn's augmenting paths); else empty."""
    choices = [np.flatnonzero(row).tolist() for row in allowed]
    taken: dict[int, int] = {}

    def find(row: int, tried: set[int]) -> bool:
        for column in choices[row]:
            if column not in tried:
                tried.add(column)
                if column not in taken or find(taken[column], tried):
                    taken[column] = row
                    return True
        return False

    return taken if all(find(row, set()) for row in range(len(choices))) else {}


def shortest_path(edges: Matrix) -> tuple[float, tuple[int, ...]]:
    """The shortest open path through all nodes: exact for few (Held and Karp), else the nearest neighbour each time."""
    return _held_karp(edges) if len(edges) <= EXACT else _nearest(edges)


def _held_karp(edges: Matrix) -> tuple[float, tuple[int, ...]]:
    count = len(edges)
    best = np.full((1 << count, count), np.inf)
    best[1 << np.arange(count), np.arange(count)] = 0.0
    sets = np.arange(1 << count)
    sizes = sum((sets >> node) & 1 for node in range(count))
    for size in range(1, count):
        those = sets[sizes == size]
        for node in range(count):
            without = those[(those >> node) & 1 == 0]
            best[without | 1 << node, node] = (best[without] + edges[:, node]).min(1)
    order, left = [int(best[-1].argmin())], (1 << count) - 1
    while len(order) < count:
        left ^= 1 << order[-1]
        order.append(int((best[left] + edges[:, order[-1]]).argmin()))
    return float(best[-1].min()), tuple(reversed(order))


def _nearest(edges: Matrix) -> tuple[float, tuple[int, ...]]:
    paths = []
    for start in range(len(edges)):
        order, length = [start], 0.0
        left = set(range(len(edges))) - {start}
        while left:
            node = min(left, key=lambda node: (edges[order[-1], node], node))
            length += float(edges[order[-1], node])
            order.append(node)
            left.remove(node)
        paths.append((length, tuple(order)))
    return min(paths)
