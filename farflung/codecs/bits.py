"""Small whole numbers, packed into as few bits as they need."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Packs each row of `codes` (whole numbers of `bits` bits, a multiple of 8 in a row) into bytes.

    The number is cut into planes of 8, 4, 2 and 1 bits. In a plane of 4 bits the first half of a row is in the low
    halves of the bytes and the second half in the high ones, and so on: long runs instead of neighbours.
    """
    packed = []
    for width, shift in _planes(bits):
        plane = codes if shift == 0 and bits == width else (codes >> shift) & ((1 << width) - 1)
        folds = plane.to(torch.uint8).view(len(codes), 8 // width, codes.shape[1] * width // 8)
        total = folds[:, 0]
        for fold in range(1, 8 // width):
            total = total | (folds[:, fold] << (fold * width))
        packed.append(total)
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=1)


def unpack_bits(packed: Tensor, bits: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """The rows of `codes` again, in `dtype`, from rows of bytes."""
    row = packed.shape[1] * 8 // bits
    codes: Tensor | None = None
    begin = 0
    for width, shift in _planes(bits):
        size = row * width // 8
        plane = packed[:, begin : begin + size]
        begin += size
        mask = (1 << width) - 1
        folds = [(plane >> (fold * width)) & mask if width < 8 else plane for fold in range(8 // width)]
        values = torch.cat(folds, dim=1).to(dtype) if len(folds) > 1 else plane.to(dtype)
        codes = values if codes is None else codes | (values << shift)
    assert codes is not None
    return codes


def _planes(bits: int) -> list[tuple[int, int]]:
    """The widths that make up `bits`, each with the position of its lowest bit."""
    planes, shift = [], 0
    for width in (8, 8, 8, 8, 4, 2, 1):
        if bits - shift >= width:
            planes.append((width, shift))
            shift += width
    return planes
