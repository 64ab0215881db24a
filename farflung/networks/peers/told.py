"""What peers that come and go tell each other of themselves."""

from __future__ import annotations

import math
from typing import Any

from farflung.networks.base import Group


class Told:
    """The part of an ElasticNetwork that is the same wherever peers meet."""

    rank: int
    peers: Any
    """Has the peer's own `info`, the run's `members`, and a `guard`."""

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
