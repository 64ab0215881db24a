"""The largest values of each chunk, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import PacketError
from farflung.codecs.bits import pack_bits, unpack_bits
from farflung.codecs.flat import FlatStage, count_of, expected
from farflung.config import UserError


@dataclass(frozen=True)
class TopK(FlatStage):
    """Keeps the k = share · chunk values of each chunk that are largest in magnitude; the others become 0.

    A kept value costs itself, which a later stage may quantize, and log2(chunk) bits for its place
    (SparseLoCo, arXiv 2508.15706).

    Args:
        share: of the values, more than 0 and at most 1.
        chunk: values that are chosen among, a power of two of at most 65536.
    """

    share: float = 0.02
    chunk: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"TopK has share={self.share}; choose more than 0 and at most 1")
        if not 8 <= self.chunk <= 1 << 16 or self.chunk & (self.chunk - 1):
            raise UserError(f"TopK has chunk={self.chunk}; choose a power of two from 8 to 65536")

    @property
    def _kept(self) -> int:
        return max(1, round(self.share * self.chunk))

    def compress(self, flat: Tensor) -> list[Tensor]:
        """The kept values, and their packed places."""
        chunks = torch.nn.functional.pad(flat, (0, -flat.numel() % self.chunk)).view(-1, self.chunk)
        places = chunks.abs().topk(self._kept, dim=1, sorted=False).indices.sort(dim=1).values
        return [chunks.gather(1, places).view(-1), pack_places(places.view(-1), self.chunk)]

    def expand(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
        """See FlatStage."""
        numel = count_of(like)
        count = -(-numel // self.chunk)
        kept = count * self._kept
        values, packed = expected(parts, (torch.float32, kept), (torch.uint8, packed_size(kept, self.chunk)))
        places = unpack_places(packed, kept, self.chunk).view(count, self._kept)
        out = torch.zeros(count, self.chunk, device=values.device)
        return out.scatter_(1, places, values.view(count, self._kept)).view(-1)[:numel]


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
