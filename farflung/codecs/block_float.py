"""Small floating-point formats, scaled to each block's largest value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflung.codecs.base import Name
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.blocks import BlockTransform

_SMALLEST = 2.0**-119
"""Blocks without a larger value are sent as zeros: their scales would leave float32's normal range."""

_UNIT = 224.0
"""What e4m3 has for 1 of a block's scale: half of its largest value, since values may be nearly twice the scale."""


@dataclass(frozen=True)
class BlockFloat(BlockTransform):
    """Rounds to a float of few bits, after dividing by a power of two for each block.

    e3m0: a sign and an exponent of 3 bits: 0 and ±2^-6 … ±1 of the block's scale (Streaming DiLoCo, arXiv 2501.18512);
    the error of a value is at most half of it, or 2^-6 of the scale.
    e4m3: the 8-bit format of arXiv 2209.05433; the error is at most a 16th of the value, or 2^-17 of the scale.

    Args:
        format: e3m0 or e4m3.
        block: values that share a scale, which takes one byte.
    """

    format: Literal["e3m0", "e4m3"] = "e3m0"
    block: int = 256
    common: ClassVar = torch.uint8

    @property
    def bits(self) -> int:
        """See BlockTransform."""
        return 4 if self.format == "e3m0" else 8

    def forward_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The packed values, and the exponents of the blocks' scales."""
        largest = x.abs().amax(1)
        # The power of two nearest to the largest, biased like float32's own exponents; 0 for a block of zeros.
        biased = torch.where(largest > _SMALLEST, _exponent(largest).clamp_(max=254), 0)
        inverse = torch.where(biased > 0, 1.0 / _scale(biased.clamp(min=1)), 0.0)
        scaled = x * inverse[:, None]
        if self.format == "e3m0":
            return _to_e3m0(scaled), biased
        fitting = (scaled * _UNIT).clamp_(-2 * _UNIT, 2 * _UNIT)
        return fitting.to(torch.float8_e4m3fn).view(torch.uint8), biased

    def inverse_rows(self, codes: Tensor, common: Tensor, out: Tensor) -> None:
        """See BlockTransform."""
        if self.format == "e3m0":
            out.copy_(_from_e3m0(codes))
        else:
            out.copy_(codes.contiguous().view(torch.float8_e4m3fn)).div_(_UNIT)
        out.mul_(_scale(common.int())[:, None])


NAME = Name(
    pattern="(e4m3|e3m0)",
    make=BlockFloat,
    examples=("e4m3", "e3m0"),
    travels="floats of 8 or 4 bits, with a scale for each block of 256",
)


def _scale(biased: Tensor) -> Tensor:
    """2^(biased - 127) as float32, made from its bits; 0 for 0."""
    return (biased.int() << 23).view(torch.float32)


def _to_e3m0(scaled: Tensor) -> Tensor:
    """|x| below 2 to a sign and 0 … 7, where 0 stands for 0 and i for 2^(i - 7); rounds to the nearest."""
    negative = torch.signbit(scaled)
    return pack_bits(((_exponent(scaled.abs()) - 120).clamp_(0, 7) | (negative.int() << 3)).to(torch.uint8), 4)


def _exponent(positive: Tensor) -> Tensor:
    """The biased exponent of the nearest power of two: 1.5 is midway, so half of the mantissa's range carries."""
    return (positive.view(torch.int32) + 0x400000) >> 23


def _from_e3m0(packed: Tensor) -> Tensor:
    codes = unpack_bits(packed, 4, torch.int32)
    exponent = codes & 7
    bits = torch.where(exponent > 0, (exponent + 120) << 23, 0) | ((codes >> 3) << 31)
    return bits.view(torch.float32)
