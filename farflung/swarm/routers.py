"""Which peer of the next stage a microbatch goes to."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Sequence
from typing import Protocol

from farflung.swarm.letters import Microbatch

FORGETTING = 0.1
"""The weight γ of the newest observation in an estimate."""


class Router(Protocol):
    """Chooses among the peers of one stage. A value without network or clock."""

    def choose(self, microbatch: Microbatch, without: Collection[int] = ()) -> int | None:
        """The peer for a microbatch, none of those `without`; None where there is nobody."""
        ...

    def observe(self, peer: int, seconds: float) -> None:
        """Tells how long a peer took for a microbatch."""
        ...

    def join(self, peer: int) -> None:
        """A peer serves the stage from now on."""
        ...

    def leave(self, peer: int) -> None:
        """A peer is gone, until it joins again."""
        ...


class ThroughputRouter:
    """Interleaved weighted round robin: each peer's share is proportional to its speed (SWARM, arXiv 2301.11913).

    A peer with the smallest sum r of the seconds that it was given comes next; then r grows by the estimate e of the
    seconds that it takes for one. e is a mean that forgets, e ← γ·t + (1 - γ)·e, and is divided by 1 - (1 - γ)ⁿ after n
    observations, since it starts at 0.
    """

    def __init__(self, peers: Sequence[int] = ()) -> None:
        self._given: list[tuple[float, int]] = []
        self._sums: dict[int, float] = {}
        self._observed: dict[int, int] = {}
        for peer in peers:
            self.join(peer)

    def choose(self, microbatch: Microbatch, without: Collection[int] = ()) -> int | None:
        """See Router."""
        passed, chosen = [], None
        while self._given and chosen is None:
            given, peer = heapq.heappop(self._given)
            if peer in without:
                passed.append((given, peer))
            else:
                chosen = peer
                passed.append((given + self.estimate(peer), peer))
        for entry in passed:
            heapq.heappush(self._given, entry)
        return chosen

    def observe(self, peer: int, seconds: float) -> None:
        """See Router."""
        if peer in self._sums:
            self._sums[peer] = FORGETTING * seconds + (1 - FORGETTING) * self._sums[peer]
            self._observed[peer] += 1

    def join(self, peer: int) -> None:
        """See Router. A newcomer is tried next, and counts as quick as the quickest until it was observed."""
        if peer not in self._sums:
            self._sums[peer], self._observed[peer] = 0.0, 0
            heapq.heappush(self._given, (self._given[0][0] if self._given else 0.0, peer))

    def leave(self, peer: int) -> None:
        """See Router."""
        if self._sums.pop(peer, None) is not None:
            del self._observed[peer]
            self._given = [entry for entry in self._given if entry[1] != peer]
            heapq.heapify(self._given)

    def estimate(self, peer: int) -> float:
        """Seconds that a peer takes for a microbatch."""
        if self._observed[peer]:
            return self._corrected(peer)
        return min((self._corrected(one) for one, count in self._observed.items() if count), default=1.0)

    def _corrected(self, peer: int) -> float:
        return self._sums[peer] / (1 - (1 - FORGETTING) ** self._observed[peer])


class PermutationRouter:
    """NoLoCo's random routes (arXiv 2506.10911): for every microbatch another permutation of a stage's peers.

    Args:
        boundary: the number of the boundary before the stage, so that each has permutations of its own.
        seed: the run's. With None, each microbatch stays in its column: the fixed routes of a pipeline.
    """

    def __init__(self, peers: Sequence[int], boundary: int, seed: int | None) -> None:
        self._peers = sorted(peers)
        self._boundary, self._seed = boundary, seed

    def choose(self, microbatch: Microbatch, without: Collection[int] = ()) -> int | None:
        """See Router. As many microbatches as there are peers go to one each, in an order drawn anew each time."""
        if not self._peers:
            return None
        turn, place = divmod(microbatch.number, len(self._peers))
        order = list(self._peers)
        if self._seed is not None:
            # A string seeds Python's generator alike on every machine and version.
            random.Random(f"{self._seed} route {microbatch.step} {turn} {self._boundary}").shuffle(order)
        turned = order[place:] + order[:place]
        return next((peer for peer in turned if peer not in without), None)

    def observe(self, peer: int, seconds: float) -> None:
        """See Router. Speed plays no part."""

    def join(self, peer: int) -> None:
        """See Router."""
        if peer not in self._peers:
            self._peers = sorted([*self._peers, peer])

    def leave(self, peer: int) -> None:
        """See Router."""
        self._peers = [one for one in self._peers if one != peer]
