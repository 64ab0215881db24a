"""Values in few bits, by levels that lie where the values do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from farflung.codecs.base import Name
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, expected, in_order, joined
from farflung.codecs.values import rescaled
from farflung.errors import UserError

_SPAN = 6.0
"""Standard deviations that the bins cover together: what lies further out counts to the outermost."""


@dataclass(frozen=True)
class Statistical(Transform):
    """Each value becomes the number of its bin, of 2^bits; each bin comes back as the mean of what fell into it.

    Bins are 6σ / 2^bits wide and lie around the mean μ, both of the tensor; the outermost are open. The levels, a
    float32 for each bin, travel along (MuLoCo, arXiv 2505.23725). Means are kept: of each tensor, x' has the mean of x.
    Of what was cut before, each chunk has levels of its own.

    Args:
        bits: 2 or 3.
    """

    bits: int = 2

    def __post_init__(self) -> None:
        if self.bits not in (2, 3):
            raise UserError(f"Statistical has bits={self.bits}; choose 2 or 3")

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See Transform: the packed bins, the levels, and bytes that an earlier transform has finished."""
        floating, finished = by_kind(tensors)
        nothing = torch.empty(0, dtype=torch.uint8, device=floating[0].device if floating else None)
        made = [self._forward(_rows(tensor)) for tensor in floating if tensor.numel()]
        codes, levels = zip(*made, strict=True) if made else ((nothing,), (nothing,))
        return [joined(codes), joined(levels), *finished]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bins, scale = 1 << self.bits, x.abs().amax(1, keepdim=True)  # squares of huge values would overflow
        x = x / torch.where(scale > 0, scale, 1)
        mean, deviation = x.mean(1, keepdim=True), x.std(1, correction=0, keepdim=True)
        width = deviation * _SPAN / bins
        codes = ((x - mean) / torch.where(width > 0, width, 1)).floor_().add_(bins // 2).clamp_(0, bins - 1)
        inside = [codes == number for number in range(bins)]  # sums in this order are the same bits on every run
        sums = torch.stack([torch.where(here, x, 0).sum(1) for here in inside], 1)
        counts = torch.stack([here.sum(1) for here in inside], 1)
        levels = rescaled(sums / counts.clamp(min=1), scale)
        packed = pack_bits(pad(codes.to(torch.uint8), (0, -x.shape[1] % 8)), self.bits)
        return packed.view(-1), levels.view(-1).view(torch.uint8)

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        rows = [_rows(tensor) for tensor in floating if tensor.numel()]
        shapes = [(len(row), row.shape[1]) for row in rows]
        codes_sizes = [count * -(-width // 8) * self.bits for count, width in shapes]
        level_sizes = [(count << self.bits) * torch.float32.itemsize for count, _ in shapes]
        wanted = (torch.uint8, sum(codes_sizes)), (torch.uint8, sum(level_sizes))
        codes, levels = expected(parts[: len(parts) - len(finished)], *wanted)
        each = zip(torch.split(codes, codes_sizes), torch.split(levels, level_sizes), shapes, strict=True)
        found = (self._inverse(*one) for one in each)
        floats = [next(found) if tensor.numel() else levels.new_empty(0).float() for tensor in floating]
        return in_order(floats, parts[2:], like)

    def _inverse(self, codes: Tensor, levels: Tensor, shape: tuple[int, int]) -> Tensor:
        count, width = shape
        numbers = unpack_bits(codes.view(count, -1), self.bits, torch.int64)[:, :width]
        return levels.view(torch.float32).view(count, -1).gather(1, numbers)


def _rows(tensor: Tensor) -> Tensor:
    """A tensor's chunks as rows of float32; all of it is one, where it was not cut."""
    return (tensor if tensor.dim() == 2 else tensor.reshape(1, -1)).float()


NAME = Name(
    pattern=r"stat(\d+)",
    make=lambda bits: Statistical(bits=int(bits)),
    examples=("stat2", "stat3"),
    travels="bins of so many bits around each tensor's mean, and the mean of what lies in each bin",
)
