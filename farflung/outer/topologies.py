"""Who averages with whom in a round. A pure function of what all replicas know, so that nobody need ask."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from farflung.errors import UserError
from farflung.networks import Group
from farflung.renamed import Formerly


class Topology(Protocol):
    """Splits the members into groups, anew each round."""

    @property
    def identical(self) -> bool:
        """Whether a group's members must all end a round with the same bits."""

    def groups(self, members: Group, round: str) -> list[Group]:
        """The groups, each sorted; a member that is in none sits the round out."""


def group_of(rank: int, groups: list[Group]) -> Group:
    """The group that a replica is in; empty when it sits the round out."""
    return next((group for group in groups if rank in group), ())


@dataclass(frozen=True)
class Everyone:
    """All members in one group (DiLoCo, synchronous training)."""

    alike = Formerly("identical")
    identical = True

    def groups(self, members: Group, round: str) -> list[Group]:
        """One of all members."""
        return [members]


COUNTED = 1 << 20
"""Ranks below are those of replicas that are counted from 0; among peers that come and go, ranks are larger."""


@dataclass(frozen=True)
class RandomGroups:
    """A new random permutation each round, cut into groups of `size` (NoLoCo, arXiv 2506.10911).

    Who is left over in a group of one sits the round out. Every replica must have the same seed. Replicas hear of a
    lost one at different rounds: groups that it was not in are the same with and without it.
    """

    size: int = 2
    seed: int = 0
    alike = Formerly("identical")
    identical = False

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 2:
            raise UserError(f"group_size is {self.size}; give a whole number, of at least 2 replicas to average")

    def groups(self, members: Group, round: str) -> list[Group]:
        """The groups of this round's permutation."""
        everyone = range(last + 1) if (last := max(members, default=COUNTED)) < COUNTED else members
        # A string seeds Python's generator alike on every machine and version.
        groups = self._cut(random.Random(f"{self.seed} {round}").sample(everyone, len(everyone)))
        if len(members) < len(everyone):
            groups = self._without_the_lost(groups, {*members})
        return [tuple(sorted(group)) for group in groups if len(group) > 1]

    def _without_the_lost(self, groups: list[list[int]], there: set[int]) -> list[list[int]]:
        """What is left of groups; those who are left alone are put together."""
        left = [[rank for rank in group if rank in there] for group in groups]
        alone = [group[0] for group in left if len(group) == 1]
        return [*(group for group in left if len(group) > 1), *self._cut(alone)]

    def _cut(self, order: list[int]) -> list[list[int]]:
        return [order[begin : begin + self.size] for begin in range(0, len(order), self.size)]
