"""Chunks: the values of one tensor that a transform works on together. A matrix of chunks has one in each row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Shape = tuple[int, int]
"""How many chunks, and the values of each."""


def cut(shape: Sequence[int], size: int) -> list[Shape]:
    """What a tensor of one dimension is cut into: chunks of `size`, and a shorter one; a matrix has been cut before."""
    if len(shape) == 2:
        return [(shape[0], shape[1])] if shape[0] * shape[1] else []
    numel = shape[0]
    return [(count, width) for count, width in ((numel // size, size), (1, numel % size)) if count and width]


def chunks_of(tensor: Tensor, size: int) -> list[Tensor]:
    """The matrices of chunks of a tensor, in float32."""
    shapes = cut(tensor.shape, size)
    parts = torch.split(tensor.float().reshape(-1), [count * width for count, width in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def totals(shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes with all chunks of one width counted together, in the order in which widths first appear."""
    counts: dict[int, int] = {}
    for count, width in shapes:
        counts[width] = counts.get(width, 0) + count
    return [(count, width) for width, count in counts.items()]


def together(matrices: Iterable[Tensor]) -> list[Tensor]:
    """One matrix for each width: see `totals`."""
    by_width: dict[int, list[Tensor]] = {}
    for matrix in matrices:
        by_width.setdefault(matrix.shape[1], []).append(matrix)
    return [those[0] if len(those) == 1 else torch.cat(those) for those in by_width.values()]


def separate(matrices: Iterable[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
    """The matrices that `together` was given, which had these shapes."""
    counts: dict[int, list[int]] = {}
    for count, width in shapes:
        counts.setdefault(width, []).append(count)
    rest = {matrix.shape[1]: iter(torch.split(matrix, counts[matrix.shape[1]])) for matrix in matrices}
    return [next(rest[width]) for _, width in shapes]
