"""Every value as it is, or rounded to a smaller float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Packet, PacketError, pack, unpack


@dataclass(frozen=True)
class Dense:
    """Sends each value in `dtype`: float32 as it is, bfloat16 or float16 at half the bytes.

    The payload is the tensors' values one after the other, little-endian, in `dtype`.
    """

    dtype: torch.dtype = torch.float32
    codec_id = 1

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """One packet of `sum(numel) * dtype.itemsize` bytes and a header."""
        values = torch.cat([tensor.detach().reshape(-1).to(self.dtype) for tensor in tensors])
        return pack(self.codec_id, tensors, values.view(torch.uint8))

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the shapes and dtypes of `like`. Raises PacketError."""
        payload = unpack(self.codec_id, packet, like)
        sizes = [tensor.numel() for tensor in like]
        if payload.numel() != sum(sizes) * self.dtype.itemsize:
            raise PacketError(f"dense payload of {payload.numel()} bytes does not hold {sum(sizes)} {self.dtype}")
        # The header leaves the payload unaligned; a copy lets it be read as wider numbers.
        values = payload.clone().view(self.dtype)
        parts = torch.split(values, sizes)
        return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, like, strict=True)]
