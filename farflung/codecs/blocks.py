"""Shared by codecs whose blocks of values have a scale in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, count_of, expected, flatten, in_order, joined, row_pieces, rows

_ROUND = 8
"""Blocks are of a multiple of so many values, so that they end with a byte."""


class BlockTransform(Transform):
    """A transform that works on blocks of values.

    A message is one long row of blocks. Those of chunks that were cut before end where a chunk ends: what is large
    in one tensor would drown what is small in the next.
    """

    block: int
    common: ClassVar[torch.dtype]
    """Of the number that a block's values have in common."""

    @property
    def bits(self) -> int:
        """What the code of one value takes."""
        raise NotImplementedError

    def forward_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The packed codes of float32 blocks, a row for each, and what each has in common."""
        raise NotImplementedError

    def inverse_rows(self, codes: Tensor, common: Tensor, out: Tensor) -> None:
        """Writes the blocks again."""
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
        wholes = [(flat, self.block), *(self._padded(tensor) for tensor in floating if tensor.dim() == 2)]
        codes, common = zip(*(self._forward(values, block) for values, block in wholes), strict=True)
        return [joined(codes), joined(common), *finished]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        numels, blocks, codes_sizes, common_sizes = self._sizes(floating)
        wanted = (torch.uint8, sum(codes_sizes)), (torch.uint8, sum(common_sizes))
        codes, common = expected(parts[: len(parts) - len(finished)], *wanted)
        pieces = torch.split(codes, codes_sizes), torch.split(common, common_sizes), numels, blocks
        values, *padded = [self._inverse(*one) for one in zip(*pieces, strict=True)]
        in_flat = iter(torch.split(values, [tensor.numel() for tensor in floating if tensor.dim() < 2]))
        in_chunks = iter(padded)
        found = [next(in_flat) if t.dim() < 2 else next(in_chunks).view(len(t), -1)[:, : t.shape[1]] for t in floating]
        return in_order([piece.contiguous() for piece in found], parts[2:], like)

    def _sizes(self, floating: Sequence[Tensor]) -> tuple[list[int], list[int], list[int], list[int]]:
        """Of all flat tensors together, then of each matrix: its values, those of a block, both parts' bytes."""
        numels = [count_of([tensor for tensor in floating if tensor.dim() < 2])]
        numels += [len(t) * self._width_of(t) for t in floating if t.dim() == 2]
        blocks = [self.block, *(self._block_of(t) for t in floating if t.dim() == 2)]
        counts = [-(-numel // block) for numel, block in zip(numels, blocks, strict=True)]
        codes = [count * block * self.bits // 8 for count, block in zip(counts, blocks, strict=True)]
        return numels, blocks, codes, [count * self.common.itemsize for count in counts]

    def _forward(self, flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """The bytes that a flat float32 tensor becomes: codes, and what each block has in common."""
        count = -(-flat.numel() // block)
        codes = torch.empty(count, block * self.bits // 8, dtype=torch.uint8, device=flat.device)
        common = torch.empty(count, dtype=self.common, device=flat.device)
        for x, code, one in zip(rows(flat, block), row_pieces(codes, block), row_pieces(common, block), strict=True):
            for to, made in zip((code, one), self.forward_rows(x), strict=True):
                to.copy_(made)
        return codes.view(-1), common.view(torch.uint8)

    def _inverse(self, codes: Tensor, common: Tensor, numel: int, block: int) -> Tensor:
        """The flat tensor again."""
        out = torch.empty(-(-numel // block), block, dtype=torch.float32, device=codes.device)
        parts = codes.view(len(out), block * self.bits // 8), common.view(self.common), out
        for code, one, x in zip(*(row_pieces(part, block) for part in parts), strict=True):
            self.inverse_rows(code, one, x)
        return out.view(-1)[:numel]

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
