"""The two halves of a message, each with a codec of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from farflung.codecs.base import Codec, Compound, Traits
from farflung.codecs.packets import Packet, PacketError, pack, packed_nbytes, unpack


class SplitCodec(Compound):
    """Encodes the first half of a message's tensors with one codec and the second half with another.

    For gossip: pseudo-gradients may be compressed like gradients, anchors only by codecs that use the receiver's
    values. The first half is about how far anchors move apart between messages; the second codec is told so.

    Args:
        first, second: the codecs of the halves.
    """

    parts: tuple[Codec, Codec]

    def __init__(self, first: Codec, second: Codec) -> None:
        self.parts = first, second

    def __repr__(self) -> str:
        return f"SplitCodec({self.parts[0]!r}, {self.parts[1]!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SplitCodec) and self.parts == other.parts

    @property
    def traits(self) -> Traits:
        """See Codec."""
        halves = self.parts[0].traits, self.parts[1].traits
        return replace(super().traits, needs_whole=True, composable=False, halves=halves)

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        sizes = [codec.nbytes(half) for codec, half in zip(self.parts, _halves(like), strict=True)]
        return packed_nbytes([[torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]])

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return sum(codec.state_nbytes(half) for codec, half in zip(self.parts, _halves(like), strict=True))

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """Two packets in one."""
        first, second = _halves(tensors)
        packet = self.parts[0].encode(first)
        self.parts[1].set_change(first)
        return pack([self], tensors, [[packet, self.parts[1].encode(second)]])

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        packets, _ = unpack([self], packet, like)
        if [packet.dtype for packet in packets] != [torch.uint8] * 2:
            raise PacketError(f"packet holds {len(packets)} parts where 2 packets were expected")
        decoded = zip(self.parts, packets, _halves(like), strict=True)
        return [tensor for codec, part, half in decoded for tensor in codec.decode(part, half)]

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """See Codec; of the first half, which the second, full of what all know, would hide."""
        packets, _ = unpack([self], packet, tensors)
        return self.parts[0].error_of(packets[0], _halves(tensors)[0])

    @property
    def wants_reference(self) -> bool:
        """See Codec."""
        return any(codec.wants_reference for codec in self.parts)

    def set_reference(self, tensors: Sequence[Tensor]) -> None:
        """See Codec."""
        for codec, half in zip(self.parts, _halves(tensors), strict=True):
            codec.set_reference(half)


def _halves(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    middle = len(tensors) // 2
    return tensors[:middle], tensors[middle:]
