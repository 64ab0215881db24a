"""Anchors that are averaged beside training, from one round to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from farflung.codecs import Dense
from farflung.outer.averaging import Averaging
from farflung.outer.companions.additions import Addition, awaited, exchanged
from farflung.outer.companions.base import Added, Along
from farflung.outer.outcomes import Outcome
from farflung.outer.topologies import Everyone, Topology, group_of

if TYPE_CHECKING:
    from farflung.cells import Cell
    from farflung.outer.exchange import Exchange
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.method import Method
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync

MIXED = "mixed"
"""What the mean of anchors is noted as, until the next round starts."""
ANCHORS = "anchors"
"""What is exchanged beside rounds: see Departures."""


@dataclass(frozen=True)
class MixedAnchors:
    """Averages anchors while replicas train (Factored Gossip DiLoCo, arXiv 2606.22768).

    An anchor stays as it is between two rounds, so its mean is never late: when the next round starts, anchor and
    weights both move by what the mean differs. Of a mean in which somebody is missing nothing is taken.

    Args:
        topology: who averages; anchors travel as they are.
    """

    topology: Topology = field(default_factory=Everyone)
    sends_more = True

    def added(self, method: Method, cells: Sequence[Cell]) -> Added:
        """See Companion: the anchors."""
        return Added(float(sum(cell.numel for cell in cells)), self.topology, hidden=True)

    def along(self, loop: OuterLoop) -> Mixing:
        """See Companion."""
        return Mixing(loop, self.topology)


class Mixing(Along):
    """One loop's mixed anchors, and those that are on their way."""

    def __init__(self, loop: OuterLoop, topology: Topology) -> None:
        self._loop = loop
        self._topology = topology
        plain = replace(loop.method, codec=Dense(), topology=topology, fuse="mean")
        rank, rule = loop.network.rank, loop.aggregation
        self._averagings = [Averaging(rank, plain, exact=True, aggregation=rule()) for _ in loop.anchors]
        self._under_way: dict[int, tuple[Addition, Exchange]] = {}

    def after(self, sync: Sync[Tensor], weights: Weights, round: int, result: Result) -> None:
        """Sends the new anchor on its way."""
        loop, label = self._loop, f"anchors after round {round} of fragment {sync.index}"
        members = loop.departures.staying(loop.holding(sync), sync.index, sync.rounds)
        members = loop.departures.without(members, sync.index, round, ANCHORS)
        group = group_of(loop.network.rank, self._topology.groups(members, label))
        loop.departures.comes(sync.index, round, group or (loop.network.rank,), ANCHORS)
        if group := loop.trained.layout.told(group if len(group) > 1 else ())[0]:
            message = weights.fragment.message(weights.anchor.clone())
            added = Addition(message, group, loop.key(label), round, sync.index, beside=ANCHORS)
            self._under_way[sync.index] = added, exchanged(loop, added, self._averagings[sync.index])

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Moves anchor and weights to the mean that has come."""
        self.hold(sync, weights)
        if (mixed := weights.noted.pop(MIXED, None)) is not None:
            theta = weights.fragment.read(weights.anchor.device)
            weights.write(theta.add_(mixed - weights.anchor))
            weights.anchor.copy_(mixed)

    def finish(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        self.before(sync, weights)

    def hold(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        if sync.index in self._under_way:
            added, exchange = self._under_way.pop(sync.index)
            result = awaited(self._loop, added, exchange)
            self._loop.departures.passes(sync.index, added.round, ANCHORS)
            if result.outcome == Outcome.AVERAGED:
                weights.noted[MIXED] = result.mean

    def taken(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        self.loads(sync)
        weights.noted.pop(MIXED, None)

    def loads(self, sync: Sync[Tensor]) -> None:
        """See Along."""
        self._under_way.pop(sync.index, None)
