"""A few numbers that are sent with a message's tensors, in the same packets, and must arrive unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.codecs import Codec, Compound, Dense, Packet, PacketError
from farflung.codecs.packets import pack, packed_nbytes, unpack

NOTES = 3
"""Notes of a message of gradients beside that of each parameter: the loss, whether it counts, an overflow."""


class Noted(Compound):
    """Sends notes (tensors without dimensions) unchanged, and all other tensors by a codec."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.parts = codec, (codec,)

    def __repr__(self) -> str:
        return f"Noted({self.codec!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noted) and self.codec == other.codec

    def nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        sizes = [codec.nbytes([like[n] for n in places]) for codec, places in self._parts(like)]
        return packed_nbytes([[torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]])

    def state_nbytes(self, like: Sequence[Tensor]) -> int:
        """See Codec."""
        return self.codec.state_nbytes([tensor for tensor in like if tensor.dim()])

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        packets = [codec.encode([tensors[n] for n in places]) for codec, places in self._parts(tensors)]
        return pack([self], tensors, [packets])

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        packets, _ = unpack([self], packet, like)
        parts = self._parts(like)
        if [part.dtype for part in packets] != [torch.uint8] * len(parts):
            raise PacketError(f"packet holds {len(packets)} parts where {len(parts)} packets were expected")
        decoded = {
            n: tensor
            for (codec, places), part in zip(parts, packets, strict=True)
            for n, tensor in zip(places, codec.decode(part, [like[n] for n in places]), strict=True)
        }
        return [decoded[n] for n in range(len(like))]

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """See Codec; of what the codec was given."""
        packets, _ = unpack([self], packet, tensors)
        for part, (codec, places) in zip(packets, self._parts(tensors), strict=True):
            if codec is self.codec:
                return codec.error_of(part, [tensors[n] for n in places])
        return 0.0

    def _parts(self, tensors: Sequence[Tensor]) -> list[tuple[Codec, list[int]]]:
        """Which tensors go by which codec; a codec that none goes by is left out."""
        notes = [n for n, tensor in enumerate(tensors) if tensor.dim() == 0]
        others = [n for n, tensor in enumerate(tensors) if tensor.dim()]
        return [(codec, places) for codec, places in ((self.codec, others), (Dense(), notes)) if places]
