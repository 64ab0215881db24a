"""Values as the frequencies that they are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Name
from farflung.codecs.chain import Transform
from farflung.codecs.chunks import separate, together, totals
from farflung.codecs.flat import expected
from farflung.codecs.values import rescaled, unscaled
from farflung.errors import UserError


@dataclass(frozen=True)
class BlockDCT(Transform):
    """The orthonormal DCT-II of chunks: squares of `chunk` × `chunk` of a matrix, runs of `chunk` of a vector.

        F = C · X · Cᵀ,   C[i, j] = sqrt(2 / chunk) · cos(π (2j + 1) i / (2 chunk)),   C[0, j] / sqrt(2)

    For use before one that keeps the largest coefficients of each chunk (DeMo, arXiv 2411.19870). A side is no
    longer than its tensor's; what else does not fill a chunk is filled up with zeros. Tensors of more than two
    dimensions count as matrices of their first one.

    Args:
        chunk: values along one side, at most 256.
    """

    chunk: int = 64
    sees_shapes = True

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 256:
            raise UserError(f"BlockDCT has chunk={self.chunk}; choose 1 to 256")

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The coefficients: a row for a chunk, and a matrix for all chunks of one size."""
        return together(self._forward(tensor.detach().float()) for tensor in tensors if tensor.numel())

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        shapes = self._shapes(like)
        sizes = totals(shapes)
        matrices = expected(parts, *((torch.float32, count * size) for count, size in sizes))
        rest = iter(separate([m.view(size) for m, size in zip(matrices, sizes, strict=True)], shapes))
        return [self._backward(next(rest), t) if t.numel() else torch.zeros_like(t, dtype=torch.float32) for t in like]

    def _shapes(self, like: Sequence[Tensor]) -> list[tuple[int, int]]:
        """How many chunks each tensor that is not empty has, and the values of each."""
        grids = (self._grid(tensor) for tensor in like if tensor.numel())
        return [(down * across, height * width) for down, height, across, width in grids]

    def _grid(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """Chunks down, height of one, chunks across, width of one; a vector is one row."""
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        columns = tensor.numel() // rows
        height, width = min(self.chunk, rows), min(self.chunk, columns)
        return -(-rows // height), height, -(-columns // width), width

    def _forward(self, tensor: Tensor) -> Tensor:
        down, height, across, width = self._grid(tensor)
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        matrix, scale = unscaled(tensor.reshape(rows, -1))
        padded = torch.nn.functional.pad(matrix, (0, across * width - matrix.shape[1], 0, down * height - rows))
        chunks = padded.view(down, height, across, width).transpose(1, 2)
        found = rescaled(_cosines(height, tensor.device) @ chunks @ _cosines(width, tensor.device).mT, scale)
        return found.reshape(down * across, height * width)

    def _backward(self, coefficients: Tensor, like: Tensor) -> Tensor:
        down, height, across, width = self._grid(like)
        small, scale = unscaled(coefficients)
        chunks = small.view(down, across, height, width)
        values = rescaled(_cosines(height, chunks.device).mT @ chunks @ _cosines(width, chunks.device), scale)
        rows = like.shape[0] if like.dim() > 1 else 1
        padded = values.transpose(1, 2).reshape(down * height, across * width)
        return padded[:rows, : like.numel() // rows].reshape(like.shape)


NAME = Name(
    pattern="block-dct",
    make=BlockDCT,
    examples=("block-dct",),
    travels="the cosine transform of chunks of 64 × 64, for `topk` to choose from",
)


@functools.cache
def _cosines(size: int, device: torch.device) -> Tensor:
    """C, computed in float64."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    place = torch.arange(size, dtype=torch.float64)[None, :]
    cosines = torch.cos(math.pi * (2 * place + 1) * frequency / (2 * size)) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.float().to(device)
