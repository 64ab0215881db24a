"""Values as the frequencies that they are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Stage
from farflung.codecs.flat import expected, rescaled, unscaled


@dataclass(frozen=True)
class Frequency(Stage):
    """The orthonormal DCT-II of chunks: squares of `chunk` × `chunk` of a matrix, runs of `chunk` of a vector.

        F = C · X · Cᵀ,   C[i, j] = sqrt(2 / chunk) · cos(π (2j + 1) i / (2 chunk)),   C[0, j] / sqrt(2)

    A stage before one that keeps the largest coefficients (DeMo, arXiv 2411.19870). What does not fill a chunk is
    filled up with zeros. Tensors of more than two dimensions count as matrices of their first one.

    Args:
        chunk: values along one side.
    """

    chunk: int = 64

    def shrink(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One part: the coefficients, chunk after chunk, and tensor after tensor."""
        chunks = [self._forward(tensor.detach().float()).reshape(-1) for tensor in tensors]
        return [torch.cat(chunks) if chunks else torch.empty(0)]

    def restore(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Stage."""
        sizes = [math.prod(self._grid(tensor)) for tensor in like]
        (flat,) = expected(parts, (torch.float32, sum(sizes)))
        return [self._backward(part, tensor) for part, tensor in zip(torch.split(flat, sizes), like, strict=True)]

    def _grid(self, tensor: Tensor) -> tuple[int, int, int, int]:
        """Chunks down, height of one, chunks across, width of one; a vector is one row."""
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        columns = tensor.numel() // max(rows, 1)
        height = self.chunk if tensor.dim() > 1 else 1
        return -(-rows // height), height, -(-columns // self.chunk), self.chunk

    def _forward(self, tensor: Tensor) -> Tensor:
        down, height, across, width = self._grid(tensor)
        if tensor.numel() == 0:
            return tensor.reshape(-1)
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        matrix, scale = unscaled(tensor.reshape(rows, -1))
        padded = torch.nn.functional.pad(matrix, (0, across * width - matrix.shape[1], 0, down * height - rows))
        chunks = padded.view(down, height, across, width).transpose(1, 2)
        return rescaled(_cosines(height, tensor.device) @ chunks @ _cosines(width, tensor.device).mT, scale)

    def _backward(self, coefficients: Tensor, like: Tensor) -> Tensor:
        down, height, across, width = self._grid(like)
        if like.numel() == 0:
            return coefficients.new_zeros(like.shape)
        small, scale = unscaled(coefficients)
        chunks = small.view(down, across, height, width)
        values = rescaled(_cosines(height, chunks.device).mT @ chunks @ _cosines(width, chunks.device), scale)
        rows = like.shape[0] if like.dim() > 1 else 1
        padded = values.transpose(1, 2).reshape(down * height, across * width)
        return padded[:rows, : like.numel() // rows].reshape(like.shape)


@functools.cache
def _cosines(size: int, device: torch.device) -> Tensor:
    """C, computed in float64."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    place = torch.arange(size, dtype=torch.float64)[None, :]
    cosines = torch.cos(math.pi * (2 * place + 1) * frequency / (2 * size)) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.float().to(device)
