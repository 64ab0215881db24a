"""What networks of peers that come and go have alike, wherever these meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from farflung.errors import UserError
from farflung.networks.base import Group
from farflung.networks.peers.admission import OTHER_SHAPES
from farflung.networks.peers.pace import Pace, counted_step
from farflung.networks.transfer import RealNetwork


class PeersNetwork(RealNetwork):
    """The part of an ElasticNetwork that follows from what peers say of themselves."""

    peers: Any
    """Has the peer's own `info`, the run's `members`, and a `guard`."""
    _pace: Pace

    @property
    def refused(self) -> Mapping[str, int]:
        """See ElasticNetwork."""
        refused: Mapping[str, int] = self.peers.guard.refused
        return refused

    def members(self) -> Group:
        """The training peers that were heard lately, and this one. Raises UserError where it cannot stay."""
        self.peers.check()
        return tuple(sorted({self.rank, *(member.rank for member in self.peers.members.training())}))

    def paced(self, step: int, every: int, rate: float = 0.0) -> int:
        """See ElasticNetwork. Raises UserError where this peer cannot stay."""
        self.peers.check()
        counted = counted_step(step, every, self.peers.members, self._pace.begins)
        own = self._pace.step(self.now())
        self.peers.info.update(trains=True, rate=rate or own, step=counted)
        self.peers.members.stepped(own)
        return counted

    def blame(self, rank: int, why: str) -> None:
        """See ElasticNetwork."""
        if member := self.peers.members.by_rank.get(rank):
            self.peers.guard.strike(member.peer, "bad message", f"{member.described}: {why}")

    def tell_others(self, **facts: float) -> None:
        """See ElasticNetwork."""
        told = {**self.peers.info["facts"], **facts}
        self.peers.info["facts"] = {name: fact for name, fact in told.items() if math.isfinite(fact)}

    def others_told(self, fact: str) -> list[float]:
        """See ElasticNetwork."""
        return [member.facts[fact] for member in self.peers.members.training() if fact in member.facts]

    def telling(self, fact: str) -> Group:
        """See ElasticNetwork."""
        own = (self.rank,) if fact in self.peers.info["facts"] else ()
        return (*own, *(member.rank for member in self.peers.members.training() if fact in member.facts))

    def _announce(self, shapes: str) -> None:
        """Announces the model, by a hash of its shapes. Raises UserError when the run's peers have another."""
        others = {member.shapes for member in self.peers.members.all() if member.shapes}
        if others and shapes not in others:
            raise UserError(OTHER_SHAPES)
        self.peers.info["shapes"] = shapes
