"""Random numbers for stochastic rounding, cheap enough for every value of a message."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.flat import PIECE

_OFFSETS = 1 << 16


@dataclass
class Dither:
    """Uniform numbers in [0, 1), each time another part of one table; equal for the same seed and count."""

    seed: int = 0
    count: int = 0

    def take(self, rows: Tensor) -> Tensor:
        """As many numbers as `rows` has, at most a piece, in its shape."""
        self.count += 1
        begin = random.Random(f"{self.seed} {self.count}").randrange(_OFFSETS)
        return _table(rows.device)[begin : begin + rows.numel()].view(rows.shape)


@functools.cache
def _table(device: torch.device) -> Tensor:
    # Wide rows (see `rows`) may make a piece a little larger than PIECE, never twice as large.
    return torch.rand(2 * PIECE + _OFFSETS, dtype=torch.float32, generator=torch.Generator().manual_seed(20250611)).to(
        device
    )
