"""Which replicas hold which part of a model: all hold the core, and some the rest; each is averaged by its holders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from farflung.errors import UserError
from farflung.joint.maps import rest_of
from farflung.networks import Group
from farflung.outer.bundles import Cells
from farflung.outer.columns import Message
from farflung.outer.fragments import Fragment, split
from farflung.outer.schedules import Schedule


@dataclass(frozen=True)
class Holders:
    """Says who holds the rest of a model that has a core, and how often that is exchanged.

    A fragment of the core has the number that it has in a model without a rest; those of the rest come after.

    Args:
        core_only: replicas that hold the core only, on a network where replicas stay; elsewhere they say so themselves.
        rest_every: rounds of the core to one of the rest.
    """

    core_only: Group = ()
    rest_every: int = 1

    def __post_init__(self) -> None:
        if self.rest_every < 1:
            raise UserError(f"rest_every is {self.rest_every}; it must be at least 1")

    def fragments(self, model: nn.Module, count: int, trained: Mapping[str, nn.Parameter]) -> list[Fragment]:
        """What is trained of the core in so many fragments, and of the rest, where this replica has it, in as many."""
        beside = rest_of(model)
        parts = [{name: p for name, p in trained.items() if (name in beside) is rest} for rest in (False, True)]
        return [
            fragment for rest, part in enumerate(parts) if part or not rest for fragment in split(model, count, part)
        ]

    def schedules(self, schedule: Schedule, fragments: int) -> list[Schedule]:
        """When each of so many fragments has rounds."""
        return [schedule.times(self.rest_every if self._of_rest(n, schedule) else 1) for n in range(fragments)]

    def of(self, fragment: int, schedule: Schedule, members: Group) -> Group:
        """The members that hold a fragment."""
        return self.of_rest(members) if self._of_rest(fragment, schedule) else members

    def apart(self, messages: Sequence[Message], schedule: Schedule, members: Group) -> dict[Group, Cells]:
        """The cells of some messages, fragment by fragment, by the members that hold them."""
        held: dict[Group, Cells] = {members: {}}
        for number, message in enumerate(messages):
            group = self.of(number, schedule, members)
            held[group] = {**held.get(group, {}), **message.cells}
        return held

    def of_rest(self, members: Group) -> Group:
        """The members that hold the rest."""
        return tuple(rank for rank in members if rank not in self.core_only)

    def _of_rest(self, fragment: int, schedule: Schedule) -> bool:
        return fragment >= schedule.fragments
