"""An exchange of gradients: the blocks that are under way, and what is told beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from farflung.networks import Group, Pending
from farflung.outer.columns import Message
from farflung.outer.fragments import Fragment
from farflung.outer.held_gradients import HeldGradients

NOTES = "notes"
"""The cell of a message's notes, which arrive as they are."""


class Notes(NamedTuple):
    """What travels beside gradients; of a group, the sums or means of what its members say.

    Args:
        present: whether each parameter has a gradient, by name.
        loss: of a closure.
        counted: whether it counts.
        overflowed: whether a gradient overflowed.
    """

    present: Mapping[str, float]
    loss: float
    counted: float
    overflowed: float


OTHER_NOTES = len(Notes._fields) - 1
"""Notes beside those of the pieces."""

BLOCK = 1 << 22
"""Values of a block, which is as many whole cells as have them: one block travels while the one before is used."""


class Part(NamedTuple):
    """A block of gradients under way: flat, with room for notes behind them."""

    block: Fragment
    flat: Tensor
    pending: Pending[list[Message]]


@dataclass
class Exchange:
    """An exchange, block by block: what this replica has, and what has come of it so far.

    Args:
        number: of the exchange.
        told: by this replica.
        fault: why it has no gradients, or "".
        group: who takes part, or () where this replica sits out.
        parts: those that are under way.
        found: what the group has told.
        known: the parameters whose mean gradients there are.
        errors, sizes: of compression, and of what was compressed, block by block.
        used_s: seconds in which what had come was used.
        finished: when the last of it had come, on the network's clock.
    """

    number: int
    gradients: HeldGradients
    told: Notes
    fault: str
    group: Group
    parts: deque[Part] = field(default_factory=deque)
    found: Notes = field(init=False)
    known: set[nn.Parameter] = field(default_factory=set)
    errors: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    used_s: float = 0.0
    finished: float = 0.0
