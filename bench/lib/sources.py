"""Texts of hidden sources for benches: Markov chains of letters, whose entropy no model can go below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LETTERS, SPREAD = 64, 0.15
"""Of a chain, and how evenly a letter is followed by the others (Dirichlet)."""
CHAINS, FIRST = 64, ord("0")


@dataclass(frozen=True)
class Source:
    """The text (n,) uint8 of a source, and its entropy, in nats a letter."""

    text: NDArray[np.uint8]
    entropy: float


def sources(count: int, letters: int, seed: int) -> list[Source]:
    """So many sources, each with at least so many letters."""
    chance, found = np.random.default_rng((seed, count)), []
    for _ in range(count):
        table = chance.dirichlet(np.full(LETTERS, SPREAD), size=LETTERS)
        text = _walk(table, -(-letters // CHAINS), chance) + FIRST
        found.append(Source(text.astype(np.uint8), _entropy(table)))
    return found


def _walk(table: NDArray[np.float64], length: int, chance: np.random.Generator) -> NDArray[np.int64]:
    """CHAINS walks of a chain, one after the other."""
    ends, at = table.cumsum(axis=1), chance.integers(LETTERS, size=CHAINS)
    found = np.empty((length, CHAINS), dtype=np.int64)
    for step in range(length):
        found[step] = at
        at = np.minimum((ends[at] < chance.random((CHAINS, 1))).sum(axis=1), LETTERS - 1)
    return found.T.flatten()


def _entropy(table: NDArray[np.float64]) -> float:
    """Of a chain's next letter, where letters are as often as they are in the long run."""
    often = np.full(LETTERS, 1 / LETTERS)
    for _ in range(1000):
        often = often @ table
    logs = np.log(table, where=table > 0, out=np.zeros_like(table))
    return float(-(often[:, None] * table * logs).sum())
