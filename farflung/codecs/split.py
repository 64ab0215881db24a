"""Tensors of one message by several codecs, whose packets travel in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from farflung.codecs.base import Codec, Compound, Traits
from farflung.codecs.packets import Packet, PacketError, pack, packed_nbytes, unpack

Shares = list[tuple[Codec, Sequence[int]]]
"""Codecs, each with the numbers of the tensors that it encodes."""


class Divided(Compound):
    """Encodes some of a message's tensors with one codec and some with others, as `shares` says."""

    def shares(self, tensors: Sequence[Tensor]) -> Shares:
        """Which codec encodes which tensors of such a message: each tensor is in one share."""
        raise NotImplementedError

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        sizes = [codec.nbytes([like[n] for n in places]) for codec, places in self.shares(like)]
        return packed_nbytes([[torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]])

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return sum(codec.state_nbytes([like[n] for n in places]) for codec, places in self.shares(like))

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """Several packets in one."""
        packets = [codec.encode([tensors[n] for n in places]) for codec, places in self.shares(tensors)]
        return pack([self], tensors, [packets])

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        packets, _ = unpack([self], packet, like)
        shares = self.shares(like)
        if [part.dtype for part in packets] != [torch.uint8] * len(shares):
            raise PacketError(f"packet holds {len(packets)} parts where {len(shares)} packets were expected")
        decoded = {
            n: tensor
            for (codec, places), part in zip(shares, packets, strict=True)
            for n, tensor in zip(places, codec.decode(part, [like[n] for n in places]), strict=True)
        }
        return [decoded[n] for n in range(len(like))]

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """See Codec; of what the first codec was given, which the rest would hide."""
        packets, _ = unpack([self], packet, tensors)
        for part, (codec, places) in zip(packets, self.shares(tensors), strict=True):
            if codec is self.parts[0]:
                return codec.error_of(part, [tensors[n] for n in places])
        return 0.0


class SplitCodec(Divided):
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
        return replace(super().traits, composable=False, halves=halves)

    def shares(self, tensors: Sequence[Tensor]) -> Shares:
        """The two halves."""
        middle = len(tensors) // 2
        return [(self.parts[0], range(middle)), (self.parts[1], range(middle, len(tensors)))]

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """Two packets in one."""
        self.parts[1].set_change(tensors[: len(tensors) // 2])
        return super().encode(tensors)

    @property
    def wants_reference(self) -> bool:
        """See Codec."""
        return any(codec.wants_reference for codec in self.parts)

    def set_reference(self, tensors: Sequence[Tensor]) -> None:
        """See Codec."""
        for codec, places in self.shares(tensors):
            codec.set_reference([tensors[n] for n in places])
