"""How a group's pseudo-gradients become one: by their mean, or by the means of their lengths and directions apart."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from farflung.codecs.values import rescaled, unscaled
from farflung.errors import UserError
from farflung.hooks.embedded import table_names
from farflung.networks import PeerLostError, Pending
from farflung.outer.bundles import Cells
from farflung.outer.columns import Message
from farflung.outer.fragments import Fragment
from farflung.outer.optimizers import sends_weights

Fuse = Literal["mean", "rda"]

LENGTHS = "lengths of tensors"
"""The cell of a message's lengths, which arrive as they are."""


class Radial:
    """Radial-directional averaging (Decoupled DiLoCo, arXiv 2604.21428), of each tensor v by itself.

        (Σ w·|v| / Σ w) · φ(Σ w·φ(v) / Σ w),   φ(v) = v / |v|,   φ(0) = 0

    Pseudo-gradients of unlike data are nearly orthogonal, so that their mean shrinks with the root of their number;
    this one is as long as they are. Of tables of embeddings it is the plain mean: most of their rows are nobody's.
    What travels are φ(v) and |v|, whose means any way of averaging can make. A matrix of more values than a cell may
    have is several tensors.

    Args:
        fragment: whose messages these are.
        model: which of its parameters are tables of embeddings.
    """

    def __init__(self, fragment: Fragment, model: nn.Module) -> None:
        plain = table_names(model)
        self._turned = {cell.name: [piece.parameter not in plain for piece in cell.pieces] for cell in fragment.cells}

    def apart(self, message: Message) -> Message:
        """A new message of the directions of its tensors, and their lengths behind them."""
        sizes = [tensor.numel() for tensors in message.cells.values() for tensor in tensors]
        flat = torch.cat([message.flat, message.flat.new_ones(len(sizes))])

        def views(flat: Tensor) -> Cells:
            return {**message.views(flat[: -len(sizes)]), LENGTHS: [flat[-len(sizes) :]]}

        made = Message(flat, [*message.names, LENGTHS], views)
        for tensor, length, turned in self._each(made):
            if turned:
                small, scale = unscaled(tensor)
                size = torch.linalg.vector_norm(small)
                tensor.copy_(small.div_(torch.where(size > 0, size, 1)))
                length.copy_(rescaled(size, scale))
        return made

    def join(self, mean: Tensor, apart: Message, into: Tensor) -> None:
        """Writes the mean of messages like one taken `apart` as one of their own kind; `mean` is used up."""
        for tensor, length, turned in self._each(apart.like(mean)):
            if turned:
                size = torch.linalg.vector_norm(tensor)
                rescaled(tensor.div_(torch.where(size > 0, size, 1)), length)
        into.copy_(mean[: into.numel()])

    def _each(self, apart: Message) -> list[tuple[Tensor, Tensor, bool]]:
        """The tensors, the length of each, and whether it counts."""
        cells = [cell for cell in apart.names if cell != LENGTHS]
        turned = [one for cell in cells for one in self._turned[cell]]
        tensors = [tensor for cell in cells for tensor in apart.cells[cell]]
        return list(zip(tensors, apart.cells[LENGTHS][0].unbind(), turned, strict=True))


class Joined:
    """A pending mean of messages that were taken apart, joined in the memory of the message itself."""

    def __init__(self, radial: Radial, pending: Pending[Tensor], apart: Message, into: Tensor) -> None:
        self._radial = radial
        self._pending = pending
        self._apart = apart
        self._into = into

    def done(self) -> bool:
        """See Pending."""
        return self._pending.done()

    @property
    def finished_at(self) -> float:
        """See Pending."""
        return self._pending.finished_at

    def wait(self, timeout: float) -> Tensor:
        """See Pending: where somebody is lost, of those who delivered."""
        try:
            mean = self._pending.wait(timeout)
        except PeerLostError:
            self._radial.join(self._apart.flat, self._apart, self._into)
            raise
        self._radial.join(mean, self._apart, self._into)
        return self._into


def radial_of(fuse: Fuse, fragment: Fragment, model: nn.Module, outer: torch.optim.Optimizer) -> Radial | None:
    """What makes a fragment's messages one, besides the plain mean. Raises UserError where they are no directions."""
    if fuse == "mean":
        return None
    if sends_weights(outer):
        told = f"fuse is {fuse!r}, which is for pseudo-gradients, and {type(outer).__name__} sends whole weights"
        raise UserError(f"{told}; leave it out, or use diloco")
    return Radial(fragment, model)
