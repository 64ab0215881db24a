"""Shared by codecs whose blocks of values have a scale in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, count_of, expected, flatten, in_order, joined

_ROUND = 8
"""Blocks are of a multiple of so many values, so that they end with a byte."""


class BlockTransform(Transform):
    """A transform that works on blocks of values.

    A message is one long row of blocks. Those of chunks that were cut before end where a chunk ends: what is large
    in one tensor would drown what is small in the next.
    """

    block: int

    def forward_blocks(self, flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The bytes that a flat float32 tensor becomes: codes, and what each block has in common."""
        raise NotImplementedError

    def inverse_blocks(self, codes: Tensor, common: Tensor, numel: int, block: int) -> Tensor:
        """The flat tensor again."""
        raise NotImplementedError

    def bytes_of(self, block: int) -> tuple[int, int]:
        """What one block takes: its codes, and what it has in common."""
        raise NotImplementedError

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        sizes = map(sum, self._sizes(floating)[2:])
        return [*(torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes), *finished]

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See Transform. Bytes that an earlier transform has finished are handed on."""
        floating, finished = by_kind(tensors)
        flat = flatten([tensor for tensor in floating if tensor.dim() < 2])
        rows = [(flat, self.block), *(self._padded(tensor) for tensor in floating if tensor.dim() == 2)]
        codes, common = zip(*(self.forward_blocks(values, block) for values, block in rows), strict=True)
        return [joined(codes), joined(common), *finished]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        numels, blocks, codes_sizes, common_sizes = self._sizes(floating)
        wanted = (torch.uint8, sum(codes_sizes)), (torch.uint8, sum(common_sizes))
        codes, common = expected(parts[: len(parts) - len(finished)], *wanted)
        pieces = torch.split(codes, codes_sizes), torch.split(common, common_sizes), numels, blocks
        values, *padded = [self.inverse_blocks(*row) for row in zip(*pieces, strict=True)]
        in_flat = iter(torch.split(values, [tensor.numel() for tensor in floating if tensor.dim() < 2]))
        in_chunks = iter(padded)
        found = [_cut_off(next(in_chunks), t) if t.dim() == 2 else next(in_flat) for t in floating]
        return in_order(found, parts[2:], like)

    def _sizes(self, floating: Sequence[Tensor]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Of all flat tensors together, then of each matrix: its values, those of a block, both parts' bytes."""
        rows = [(count_of([tensor for tensor in floating if tensor.dim() < 2]), self.block)]
        rows += [(len(t) * self._width_of(t), self._block_of(t)) for t in floating if t.dim() == 2]
        taken = [[numel, block, *(-(-numel // block) * size for size in self.bytes_of(block))] for numel, block in rows]
        numels, blocks, codes, common = map(list, zip(*taken, strict=True))
        return numels, blocks, codes, common

    def _block_of(self, chunks: Tensor) -> int:
        """The values of a block where a chunk is cut into equally large ones, of at most `block` values."""
        width = chunks.shape[1]
        return -(-width // (_ROUND * -(-width // self.block))) * _ROUND

    def _width_of(self, chunks: Tensor) -> int:
        """The values of a chunk that is filled up to whole blocks."""
        return -(-chunks.shape[1] // self._block_of(chunks)) * self._block_of(chunks)

    def _padded(self, chunks: Tensor) -> tuple[Tensor, int]:
        """Chunks filled up with zeros, in one row; and the values of a block."""
        missing = self._width_of(chunks) - chunks.shape[1]
        return torch.nn.functional.pad(chunks, (0, missing)).view(-1), self._block_of(chunks)


def _cut_off(padded: Tensor, chunks: Tensor) -> Tensor:
    """A matrix of chunks without what filled them up."""
    return padded.view(len(chunks), -1)[:, : chunks.shape[1]].contiguous()
