"""Shapes of parameters, without making a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from farflung.cells import Cell, Shape, cells_among


def side_of(parameters: float) -> int:
    """The rows, and columns, of a square matrix as large as those of a language model of so many parameters."""
    return max(round(math.cbrt(8 * parameters)), 1)


def square_model(parameters: float) -> list[Cell]:
    """Square matrices of about so many parameters in all, as large as those of a language model of that size."""
    side = side_of(parameters)
    return cells_among([[(side, side)]] * max(round(parameters / side**2), 1))


def shard_shapes(shapes: Sequence[Shape], shards: int, shard: int) -> list[Shape]:
    """What one of the shards has of parameters of these shapes: rows, dealt out as `torch.chunk` does."""
    held = []
    for rows, *rest in filter(None, shapes):
        most = -(-rows // shards)
        own = min(most, rows - most * shard)
        if own > 0:
            held.append((own, *rest))
    return held
