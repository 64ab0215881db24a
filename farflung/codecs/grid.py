"""The grids that modulo codecs count in: a step for each block of values, and numbers by which the count is checked."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


class Grid:
    """Steps s = R / 2^bits of blocks with ranges R, of which the low `bits` (1 to 8) of a count are known.

    `ranges` are R of each block, in bfloat16, as sent; 0 for a block of zeros.
    """

    def __init__(self, ranges: Tensor, bits: int) -> None:
        steps = ranges.float() / 2.0**bits
        self.zeros = ranges == 0
        self.any_zeros = ranges.device.type != "cpu" or bool(self.zeros.any())  # another device would have to wait
        self.steps = torch.where(steps > 0, steps, 1.0)
        self.errors = steps / 2
        """By how much a value on the grid errs at most."""
        self.reach = torch.where(self.zeros, math.inf, steps * (2.0**bits / 2 - 0.125))
        """How far off another's values may be for it to read these: half of R, less what float32 may round."""


def counted(u: Tensor, step: Tensor, noise: Tensor) -> Tensor:
    """k = floor(u / s + d)."""
    return (u / step[:, None]).add_(noise).floor_()


def valued(k: Tensor, step: Tensor, noise: Tensor) -> Tensor:
    """u' = s · (k + 1/2 - d), in the memory of k; the same bits for sender and receiver."""
    return k.add_(0.5).sub_(noise).mul_(step[:, None])


def checked(high: Tensor) -> Tensor:
    """A byte for each row of what was not sent; neighbours weigh differently, or opposite errors would cancel out."""
    # Bytes wrap around, which is all that a sum modulo 256 needs, and are a quarter of the work.
    low = high.to(torch.int8).view(torch.uint8)
    return (low * _weights(high.shape[1], high.device)).sum(1, dtype=torch.uint8)


@functools.cache
def _weights(block: int, device: torch.device) -> Tensor:
    """1 to 255 for each place; an odd sum, or a block that is off everywhere by the same would look right."""
    weights = torch.randint(1, 256, (block,), generator=torch.Generator().manual_seed(block), dtype=torch.int32)
    weights[0] += 1 - weights.sum() % 2
    return weights.to(torch.uint8).to(device)
