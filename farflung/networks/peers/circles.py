"""How messages pass through a folder: whole or in parts, and in which circles many share what they read."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.networks.base import Group

FEW = 4
"""Members among whom each reads every packet: so few are no more requests than with a bundle."""
CIRCLE = 16
"""Members of a circle."""
SMALL = 1 << 19
"""Bytes of a packet that is bundled: what is larger takes longer to write again than a request is worth."""

MEETING = 2
"""Requests of a meeting that wait for each other: a note, and a listing in which others' are."""
IN_TURN = 4
"""Requests of an exchange that wait for each other: a packet, a listing, another's packet, and half a pause."""


def averages_all(members: int, nbytes: float) -> bool:
    """Whether each of a group averages all of a message, and not a part of it: that is half as many requests."""
    return members == 2 or nbytes <= SMALL


def passes(members: int, parts: Sequence[float], nbytes: float) -> list[tuple[float, int]]:
    """How a message passes through a folder, hop after hop: the bytes of each packet, and how many read it.

    Where members call each other, `parts` are the shares of it that go to each other, by hop.
    """
    if members == 2 or (len(parts) > 1 and averages_all(members, nbytes)):
        return [(nbytes, members - 1)]
    *first, last = parts
    return [*((part * nbytes, 1) for part in first), (last * nbytes, members - 1)]


def circles(group: Group) -> list[Group]:
    """A group in parts of about the same size; none where it is small."""
    count = -(-len(group) // CIRCLE) if len(group) > FEW else 0
    return [group[at::count] for at in range(count)]
