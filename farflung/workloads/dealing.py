"""Which samples a replica trains on in a step: pure functions, with no state to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farflung.lazy import Later

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from farflung.workloads.base import Ids
else:
    np = Later("numpy")

ROUNDS = 8
"""Of the network below."""
LEAST_HALF = 2
"""Bits of half a number, at least: of fewer, some orders would never come."""


@dataclass(frozen=True)
class Deal:
    """How samples are dealt to replicas: each sample once before any comes twice, in an order that the seed shuffles.

    Args:
        replicas: how many deal the samples out among themselves; None where they come and go, and each sees all
            samples in an order of its own.
        apart: whether a replica sees only its own one of so many stretches of the data.
        draws: whether samples are drawn anew in each step instead, with replacement, as earlier releases did.
        cut: how the method cuts what hangs together, such as a graph, into the replicas' parts; "" where it does not.
    """

    replicas: int | None = None
    apart: bool = False
    draws: bool = False
    cut: str = ""

    @property
    def shares(self) -> int:
        """Stretches of one length that the data is cut into."""
        return (self.replicas or 1) if self.apart else 1

    def ids(self, seed: int, replica: int, step: int, size: int, available: int) -> Ids:
        """The `size` of the `available` samples that a replica trains on in a step."""
        if not self.draws:
            return self.at(seed, replica, step * size + np.arange(size), available)
        each = available // self.shares
        drawn = np.random.default_rng((seed, replica, step)).integers(each, size=size)
        return replica % self.shares * each + drawn

    def at(self, seed: int, replica: int, places: Ids, available: int) -> Ids:
        """The samples at some places, from 0, of the endless row that a replica trains on; where none are drawn."""
        if self.apart or self.replicas is None:
            each = available // self.shares
            return replica % self.shares * each + in_epochs(places, each, (seed, replica))
        return in_epochs(places * self.replicas + replica % self.replicas, available, (seed,))


def mixed(seed: int, replica: int, places: Ids, shares: Sequence[int]) -> tuple[Ids, Ids]:
    """Which of several sources a replica's sequences at some places come from, and the how-manieth of it each is.

    As many places, one after the other, as there are shares have each source's share of them, in a shuffled order.
    """
    block = sum(shares)
    of, turn = np.empty_like(places), np.empty_like(places)
    for number in np.unique(places // block):
        here = places // block == number
        order = permuted(np.arange(block), block, (seed, replica, int(number)))
        sources = np.searchsorted(np.cumsum(shares), order, side="right")
        of[here] = sources[places[here] % block]
        for source, share in enumerate(shares):
            own = here & (of == source)
            turn[own] = number * share + np.cumsum(sources == source)[places[own] % block] - 1
    return of, turn


ALL = Deal()
"""All samples come to each replica."""


def in_epochs(places: Ids, count: int, key: Sequence[int]) -> Ids:
    """Which of `count` samples lie at these places of an endless row of epochs.

    Each epoch has every sample once, in an order of its own that follows from the key.
    """
    epochs, places = np.divmod(places, count)
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permuted(places[here], count, (*key, int(epoch)))
    return found


def permuted(numbers: Ids, count: int, key: Sequence[int]) -> Ids:
    """Where a permutation of 0 to `count` - 1 takes some numbers: each key gives another one, and no table is made.

    It is a Feistel network on the least even number of bits that hold `count`. What falls outside goes through it
    again until it does not, which always comes to pass, since each number is on a circle.
    """
    half = max(LEAST_HALF, (int(count - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    found = numbers.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        found[outside] = _through_network(found[outside], half, keys)
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def _through_network(numbers: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_hashed(right ^ key) & mask)
    return (left << bits) | right


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers whose bits all depend on all bits: the last steps of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
