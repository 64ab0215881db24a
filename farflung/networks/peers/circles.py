"""In which circles many share what they read, where they meet in a folder."""

from __future__ import annotations

from farflung.networks.base import Group

FEW = 4
"""Members among whom each reads every packet: so few are no more requests than with a bundle."""
CIRCLE = 16
"""Members of a circle."""
SMALL = 1 << 19
"""Bytes of a packet that is bundled: what is larger takes longer to write again than a request is worth."""


def circles(group: Group) -> list[Group]:
    """A group in parts of about the same size; none where it is small."""
    count = -(-len(group) // CIRCLE) if len(group) > FEW else 0
    return [group[at::count] for at in range(count)]
