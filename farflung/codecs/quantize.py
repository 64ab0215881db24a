"""Values on an even grid of a few steps, one grid for each block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.blocks import BlockTransform
from farflung.codecs.dither import Dither
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
    common: ClassVar = torch.float32
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

    def forward_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The packed codes and the steps."""
        distance, zero, last = self._grid
        steps = x.abs().amax(1).div_(zero)
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
        return pack_bits(grid.to(torch.int8).view(torch.uint8), self.bits), steps

    def inverse_rows(self, codes: Tensor, common: Tensor, out: Tensor) -> None:
        """See BlockTransform."""
        distance, zero, _ = self._grid
        if self.bits == 8:
            out.copy_(codes.view(torch.int8)).add_(_TO_SIGNED - zero)
        else:
            out.copy_(unpack_bits(codes, self.bits)).sub_(zero / distance)
        rescaled(out, common[:, None] * distance)

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
    pattern=r"int(\d+)",
    make=lambda bits: Quantize(bits=int(bits)),
    examples=("int8", "int4", "int2"),
    travels="whole numbers of so many bits, with a step for each block of 128",
)
