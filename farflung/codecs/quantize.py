"""Values on an even grid of a few steps, one grid for each block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import Traits
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.blocks import BlockTransform
from farflung.codecs.dither import Dither
from farflung.codecs.flat import row_pieces, rows
from farflung.codecs.names import Name
from farflung.codecs.values import rescaled
from farflung.errors import UserError

_TO_SIGNED = 128
"""Codes of 8 bits are made as signed bytes: floats become those six times faster than unsigned ones."""


@dataclass
class Quantize(BlockTransform):
    """Each value x of a block becomes a whole number of `bits` bits.

        step = max|x| / L;   code = round(x / step) + L;   x' = (code - L) · step;   L = 2^(bits - 1) - 1

    so that |x - x'| is at most half a step (a whole one if stochastic). With 2 bits the four values are ±step and
    ±3·step, step = max|x| / 3, since a quarter of the codes would be too much for zero; |x - x'| ≤ step.
    Stochastic rounding (QSGD, arXiv 1610.02132) makes the mean of x' equal x.

    Args:
        bits: 8, 4 or 2.
        block: values that share a step, a multiple of 8.
        stochastic: round up or down at random, in proportion.
    """

    bits: int = 8
    block: int = 128
    stochastic: bool = False
    _dither: Dither = field(default_factory=Dither, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise UserError(f"Quantize has bits={self.bits}; choose 8, 4 or 2")
        if self.block < 8 or self.block % 8:
            raise UserError(f"Quantize has block={self.block}; choose a multiple of 8")

    @property
    def traits(self) -> Traits:
        """See Codec."""
        return Traits(remembers=self.stochastic)

    @property
    def _grid(self) -> tuple[int, int, int]:
        """The steps between codes, the steps from the first code to zero, and the last code."""
        if self.bits == 2:
            return 2, 3, 3
        levels = (1 << (self.bits - 1)) - 1
        return 1, levels, 2 * levels

    def bytes_of(self, block: int) -> tuple[int, int]:
        """See BlockTransform; a step is a float32."""
        return block * self.bits // 8, 4

    def forward_blocks(self, flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The packed codes, and one float32 step a block, as bytes."""
        count = -(-flat.numel() // block)
        codes = torch.empty(count, block * self.bits // 8, dtype=torch.uint8, device=flat.device)
        steps = torch.empty(count, dtype=torch.float32, device=flat.device)
        for x, code, step in zip(rows(flat, block), row_pieces(codes, block), row_pieces(steps, block), strict=True):
            self._quantize(x, code, step)
        return codes.view(-1), steps.view(torch.uint8)

    def _quantize(self, x: Tensor, codes: Tensor, steps: Tensor) -> None:
        distance, zero, last = self._grid
        torch.amax(x.abs(), dim=1, out=steps)
        steps.div_(zero)
        grid = x / torch.where(steps > 0, steps, 1)[:, None]
        grid.add_(zero)
        if distance != 1:
            grid.div_(distance)
        if self.stochastic:
            grid.add_(self._dither.take(grid)).floor_()
        else:
            grid.round_()
        grid.clamp_(0, last)
        if self.bits == 8:
            grid.sub_(_TO_SIGNED)
        codes.copy_(pack_bits(grid.to(torch.int8).view(torch.uint8), self.bits))

    def inverse_blocks(self, codes: Tensor, common: Tensor, numel: int, block: int) -> Tensor:
        """See BlockTransform."""
        count = -(-numel // block)
        distance, zero, _ = self._grid
        out = torch.empty(count, block, dtype=torch.float32, device=codes.device)
        pieces = zip(
            row_pieces(codes.view(count, block * self.bits // 8), block),
            row_pieces(common.view(torch.float32), block),
            row_pieces(out, block),
            strict=True,
        )
        for code, step, x in pieces:
            if self.bits == 8:
                x.copy_(code.view(torch.int8)).add_(_TO_SIGNED - zero)
            else:
                x.copy_(unpack_bits(code, self.bits)).sub_(zero / distance)
            rescaled(x, step[:, None] * distance)
        return out.view(-1)[:numel]

    def state_dict(self) -> dict[str, Any]:
        """How many random numbers have been taken."""
        return {"count": self._dither.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._dither.count = state["count"]

    def seed(self, seed: int) -> None:
        """See Codec."""
        self._dither.seed = seed


NAME = Name(
    pattern="int([842])",
    make=lambda bits: Quantize(bits=int(bits)),
    examples=("int8", "int4", "int2"),
    travels="whole numbers of so many bits, with a step for each block of 128",
)
