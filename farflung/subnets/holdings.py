"""Which replica holds which unit: a pure function of the seed, the rounds so far and who took part in them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.networks import Group

Units = list[list[int]]
"""The numbers of some units of each pool, rising."""


@dataclass(frozen=True)
class Holdings:
    """The replica that holds each unit, by pool and unit, and the one that had it before, which keeps its copy."""

    holders: tuple[tuple[int, ...], ...]
    givers: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> Units:
        """What a replica holds."""
        return [[unit for unit, holder in enumerate(pool) if holder == rank] for pool in self.holders]

    def moving(self, later: Holdings, giver: int, taker: int) -> Units:
        """What goes from one replica to another until later holdings."""
        return [
            [unit for unit, (old, new) in enumerate(zip(*pools, strict=True)) if (old, new) == (giver, taker)]
            for pools in zip(self.holders, later.holders, strict=True)
        ]

    def among(self, members: Group) -> Holdings:
        """Where some replicas are lost, their units are back at those who gave them, or at any who is left."""
        holders = tuple(
            tuple(
                next((one for one in before if one in members), members[unit % len(members)])
                for unit, before in enumerate(zip(*pools, strict=True))
            )
            for pools in zip(self.holders, self.givers, strict=True)
        )
        return Holdings(holders, self.givers)

    def dealt(self, groups: Sequence[Group], seed: int, label: str) -> Holdings:
        """Each group pools the units of its members and deals them anew: as many of each pool to each."""
        holders, givers = [], []
        for place, (before, gave) in enumerate(zip(self.holders, self.givers, strict=True)):
            now, last = list(before), list(gave)
            for group in groups:
                # A string seeds Python's generator alike on every machine and version.
                deal = random.Random(f"{seed} {label} pool {place} {group}")
                units = [unit for unit, holder in enumerate(before) if holder in group]
                takers = deal.sample(group, len(group))
                for number, unit in enumerate(deal.sample(units, len(units))):
                    now[unit] = takers[number % len(group)]
                    last[unit] = before[unit] if now[unit] != before[unit] else gave[unit]
            holders.append(tuple(now))
            givers.append(tuple(last))
        return Holdings(tuple(holders), tuple(givers))

    def digest(self) -> bytes:
        """Eight bytes that are equal where holdings are."""
        return hashlib.sha256(repr(self.holders).encode()).digest()[:8]


def first_holdings(units: Sequence[int], members: Group, seed: int) -> Holdings:
    """The first deal, among all, of pools of so many units."""
    all_at_first = tuple((members[0],) * count for count in units)
    holders = Holdings(all_at_first, all_at_first).dealt([members], seed, "start").holders
    return Holdings(holders, holders)
