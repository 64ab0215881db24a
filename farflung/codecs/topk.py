"""The largest values of each chunk, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits, share_of
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.chain import Transform
from farflung.codecs.chunks import chunks_of, cut, separate, together, totals
from farflung.codecs.flat import by_kind, expected, in_order, joined
from farflung.codecs.packets import PacketError
from farflung.errors import UserError


@dataclass(frozen=True)
class TopK(Transform):
    """Keeps the k = share · chunk values of each chunk that are largest in magnitude; the others become 0.

    Each tensor is cut into chunks by itself; what was cut before (BlockDCT) stays as it is. A chunk that is
    shorter (a vector, a tensor's last one) keeps k values as well, or all where it has no more. A kept value costs
    itself, which a later transform may quantize, and log2 of the chunk's size in bits for its place (SparseLoCo,
    arXiv 2508.15706); where a chunk keeps all, places cost nothing.

    Args:
        share: of the values of a full chunk, more than 0 and at most 1.
        chunk: values that are chosen among, a power of two of at most 65536.
    """

    share: float = 0.02
    chunk: int = 4096

    traits = Traits(sparse=True)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"TopK has share={self.share}; choose more than 0 and at most 1")
        if not 8 <= self.chunk <= 1 << 16 or self.chunk & (self.chunk - 1):
            raise UserError(f"TopK has chunk={self.chunk}; choose a power of two from 8 to 65536")

    def _kept(self, size: int) -> int:
        """Values kept of a chunk of this size."""
        return min(max(1, round(self.share * self.chunk)), size)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The kept values of chunks of each size, a row for a chunk; then all packed places."""
        floating, finished = by_kind(tensors)
        values, packed = [], [torch.empty(0, dtype=torch.uint8, device=floating[0].device if floating else None)]
        for chunks in together(matrix for tensor in floating for matrix in chunks_of(tensor, self.chunk)):
            size = chunks.shape[1]
            if (kept := self._kept(size)) < size:
                places = chunks.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
                packed.append(pack_places(places.view(-1), size))
                chunks = chunks.gather(1, places)
            values.append(chunks)
        return [*values, torch.cat(packed), *finished]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        shapes = [cut(tensor.shape, self.chunk) for tensor in floating]
        sizes = totals(shape for those in shapes for shape in those)
        places = [self._places_size(count, size) for count, size in sizes]
        values = [(torch.float32, count * self._kept(size)) for count, size in sizes]
        own = len(values) + 1
        *kept, packed = expected(parts[: len(parts) - len(finished)], *values, (torch.uint8, sum(places)))
        spread = map(self._spread, kept, torch.split(packed, places), sizes)
        chunks = iter(separate(spread, [shape for those in shapes for shape in those]))
        whole = [[next(chunks).view(-1) for _ in those] or [packed.new_empty(0).float()] for those in shapes]
        return in_order([joined(matrices) for matrices in whole], parts[own:], like)

    def _places_size(self, count: int, size: int) -> int:
        kept = self._kept(size)
        return packed_size(count * kept, size) if kept < size else 0

    def _spread(self, values: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        """Chunks with values at their places and zeros elsewhere."""
        count, size = shape
        if (kept := self._kept(size)) == size:
            return values.view(shape)
        places = unpack_places(packed, count * kept, size).view(count, kept)
        return values.new_zeros(shape).scatter_(1, places, values.view(count, kept))


NAME = Name(
    pattern=r"topk(\d+(?:\.\d+)?)",
    make=lambda percent: TopK(share=share_of(percent)),
    examples=("topk2",),
    travels="the largest values of each 4096 of a tensor, here 2% (as many of a shorter rest), and their places",
)


def pack_places(places: Tensor, chunk: int) -> Tensor:
    """Places within chunks, log2(chunk) bits each."""
    padded = torch.nn.functional.pad(places.int(), (0, -places.numel() % 8))
    return pack_bits(padded.view(1, -1), bits_of(chunk)).view(-1)


def unpack_places(packed: Tensor, count: int, chunk: int) -> Tensor:
    """The first `count` places, as int64. Raises PacketError when one lies outside of a chunk."""
    places = unpack_bits(packed.view(1, -1), bits_of(chunk), torch.int32).view(-1)[:count].long()
    if count and int(places.max()) >= chunk:
        raise PacketError("packet names a place outside of its chunk")
    return places


def packed_size(count: int, chunk: int) -> int:
    """Bytes that so many packed places take."""
    return -(-count // 8) * bits_of(chunk)


def bits_of(chunk: int) -> int:
    """Bits that a place in a chunk takes."""
    return (chunk - 1).bit_length()
