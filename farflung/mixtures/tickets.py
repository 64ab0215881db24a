"""Tickets to splits: how all machines split that have one, and how many they are together."""

from __future__ import annotations

from collections.abc import Collection

from farflung.errors import UserError, counted
from farflung.mixtures.settings import OWN, SplitSettings
from farflung.networks.peers.ticket import SIZE, Ticket
from farflung.tables import from_table

NAME = "mixture split"


def ticket_to(settings: SplitSettings, machines: int) -> Ticket:
    """A ticket to a split of so many machines. Raises UserError for more of them than routers."""
    if machines > settings.experts:
        raise UserError(
            f"machines is {machines}, for {counted(settings.experts, 'router')}; start at most one for each"
        )
    return Ticket.new(NAME, {**settings.shared, SIZE: machines})


def machines_of(ticket: Ticket) -> int:
    """How many machines split together. Raises UserError for a ticket to something else."""
    if ticket.size is None:
        raise UserError(f"the ticket leads to {ticket.name}, which is no split; give the one that --invite has written")
    return ticket.size


def settings_of(ticket: Ticket, own: SplitSettings, given: Collection[str]) -> SplitSettings:
    """How a ticket's machines split, this one with its own data and folder.

    Raises UserError where one of the settings that were `given` here is another one.
    """
    table = {name: value for name, value in ticket.settings.items() if name != SIZE}
    own_table = {name: getattr(own, name) for name in OWN} | {"data": [*own.data]}
    told = from_table(SplitSettings, {**table, **own_table}, "the ticket")
    for name in SplitSettings.__dataclass_fields__.keys() & given:
        here, there = getattr(own, name), getattr(told, name)
        if here != there:
            raise UserError(f"{name} is {here!r} here, and {there!r} on the machines of the ticket; leave it out")
    return told
