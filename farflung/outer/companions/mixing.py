"""Anchors that are averaged beside training, from one round to the next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from farflung.codecs import Dense
from farflung.networks import Group, PeerLostError
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.companions.base import Along
from farflung.outer.exchange import Exchange, not_compared, start_columns, started
from farflung.outer.optimizers import state_by_anchor
from farflung.outer.topologies import Everyone, Topology, group_of

if TYPE_CHECKING:
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync

MIXED = "mixed"
"""What the mean of anchors is called among what is kept of one, until its next round starts."""


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

    def along(self, loop: OuterLoop) -> Mixing:
        """See Companion."""
        return Mixing(loop, self.topology)


class Mixing(Along):
    """One loop's mixed anchors, and those that are on their way."""

    def __init__(self, loop: OuterLoop, topology: Topology) -> None:
        self._loop = loop
        self._topology = topology
        plain = replace(loop.method, codec=Dense(), topology=topology, fuse="mean")
        self._averagings = [Averaging(loop.network.rank, plain, exact=True) for _ in loop.anchors]
        self._under_way: dict[int, tuple[Group, Exchange]] = {}

    def after(self, sync: Sync[Tensor], weights: Weights, result: Result) -> None:
        """Sends the new anchor on its way."""
        loop, label = self._loop, f"anchors before {sync.label}"
        members = loop.holders.of(sync.index, loop.method.schedule, loop.network.members())
        members = loop.departures.without(members, sync.index, sync.rounds)
        group = group_of(loop.network.rank, self._topology.groups(members, label))
        if len(group) < 2:
            return
        message = weights.fragment.message(weights.anchor.clone())
        columns, key, now = loop.columns.of(group, message.names), loop.key(label), loop.network.now
        meetings = [Meeting(column.network, group, column.key(key), sync.rounds) for column in columns]
        averaging = self._averagings[sync.index]
        start = partial(start_columns, message, group, columns, meetings, not_compared, averaging, now)
        self._under_way[sync.index] = group, started(start, message, loop.side, loop.network, now())

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Moves anchor and weights to the mean that has come."""
        self.hold(sync, weights)
        kept = state_by_anchor(self._loop.outer).get(weights.anchor, {})
        if (mixed := kept.pop(MIXED, None)) is not None:
            theta = weights.fragment.read(weights.anchor.device)
            weights.write(theta.add_(mixed - weights.anchor))
            weights.anchor.copy_(mixed)

    def finish(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        self.before(sync, weights)

    def hold(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        if sync.index not in self._under_way:
            return
        group, exchange = self._under_way.pop(sync.index)
        try:
            with self._loop.departures.watched(group, sync.index, sync.rounds - 1):
                mean = exchange.result.wait(self._loop.deadline_s).mean
        except PeerLostError:
            return
        state_by_anchor(self._loop.outer)[weights.anchor][MIXED] = mean
