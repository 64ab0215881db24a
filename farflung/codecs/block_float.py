"""Small floating-point formats, scaled to each block's largest value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.blocks import BlockTransform
from farflung.codecs.flat import row_pieces, rows
from farflung.codecs.names import Name

_SMALLEST = 2.0**-119
"""Blocks without a larger value are sent as zeros: their scales would leave float32's normal range."""


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

    @property
    def _bits(self) -> int:
        return 4 if self.format == "e3m0" else 8

    def bytes_of(self, block: int) -> tuple[int, int]:
        """See BlockTransform; a scale is its exponent."""
        return block * self._bits // 8, 1

    def forward_blocks(self, flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The packed values, and one byte a block: its scale's exponent."""
        count = -(-flat.numel() // block)
        codes = torch.empty(count, block * self._bits // 8, dtype=torch.uint8, device=flat.device)
        exponents = torch.empty(count, dtype=torch.uint8, device=flat.device)
        for x, code, exponent in zip(
            rows(flat, block), row_pieces(codes, block), row_pieces(exponents, block), strict=True
        ):
            largest = x.abs().amax(1)
            # The power of two nearest to the largest, biased like float32's own exponents; 0 for a block of zeros.
            biased = torch.where(largest > _SMALLEST, _exponent(largest).clamp_(max=254), 0)
            exponent.copy_(biased)
            scaled = x * _inverse_scale(biased)[:, None]
            code.copy_(_to_e3m0(scaled) if self.format == "e3m0" else _to_e4m3(scaled))
        return codes.view(-1), exponents

    def inverse_blocks(self, codes: Tensor, common: Tensor, numel: int, block: int) -> Tensor:
        """See BlockTransform."""
        count = -(-numel // block)
        out = torch.empty(count, block, dtype=torch.float32, device=codes.device)
        for code, exponent, x in zip(
            row_pieces(codes.view(count, block * self._bits // 8), block),
            row_pieces(common, block),
            row_pieces(out, block),
            strict=True,
        ):
            x.copy_(_from_e3m0(code) if self.format == "e3m0" else _from_e4m3(code))
            x.mul_(_scale(exponent.int())[:, None])
        return out.view(-1)[:numel]


NAME = Name(
    pattern="(e4m3|e3m0)",
    make=BlockFloat,
    examples=("e4m3", "e3m0"),
    travels="floats of 8 or 4 bits, with a scale for each block of 256",
)


def _scale(biased: Tensor) -> Tensor:
    """2^(biased - 127) as float32, made from its bits; 0 for 0."""
    return (biased.int() << 23).view(torch.float32)


def _inverse_scale(biased: Tensor) -> Tensor:
    return torch.where(biased > 0, 1.0 / _scale(biased.clamp(min=1)), 0.0)


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


def _to_e4m3(scaled: Tensor) -> Tensor:
    # 2 times 224 is its largest value.
    return (scaled * 224.0).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(packed: Tensor) -> Tensor:
    return packed.contiguous().view(torch.float8_e4m3fn).to(torch.float32).div_(224.0)
