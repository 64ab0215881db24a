"""What a codec is, and the packet it makes: a message as one self-describing buffer of bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Packet = Tensor
"""One contiguous uint8 tensor: a header of 24 bytes, then the payload."""

MAGIC = b"FARF"
VERSION = 1
_HEADER = struct.Struct("<4sHHIQI")  # magic, version, codec id, shapes hash, payload length, checksum


class PacketError(ValueError):
    """A packet cannot be read: truncated, altered, or made by another version, codec or model."""


class Codec(Protocol):
    """Turns the tensors of a message into a packet and back."""

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """The tensors as one packet, on their device."""
        ...

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the shapes and dtypes of `like`. Raises PacketError."""
        ...


def shapes_hash(tensors: Sequence[Tensor]) -> int:
    """A 32-bit checksum of the shapes, by which two replicas notice that their models differ."""
    return zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())


def pack(codec_id: int, tensors: Sequence[Tensor], payload: Tensor) -> Packet:
    """Puts a header before `payload` (a flat uint8 tensor)."""
    fields = MAGIC, VERSION, codec_id, shapes_hash(tensors), payload.numel(), _checksum(payload)
    header = torch.frombuffer(bytearray(_HEADER.pack(*fields)), dtype=torch.uint8)
    return torch.cat([header.to(payload.device), payload])


def unpack(codec_id: int, packet: Packet, like: Sequence[Tensor]) -> Tensor:
    """The payload of a packet made by `pack`. Raises PacketError, saying what is wrong with it."""
    if packet.numel() < _HEADER.size:
        raise PacketError(f"packet of {packet.numel()} bytes is shorter than its header ({_HEADER.size})")
    header = packet[: _HEADER.size].cpu().numpy().tobytes()
    payload = packet[_HEADER.size :]
    magic, version, codec, shapes, length, checksum = _HEADER.unpack(header)
    expected = (
        ("magic", magic, MAGIC),
        ("version", version, VERSION),
        ("codec", codec, codec_id),
        ("shapes hash", shapes, shapes_hash(like)),
        ("payload length", payload.numel(), length),
        ("checksum", _checksum(payload), checksum),
    )
    for what, found, wanted in expected:
        if found != wanted:
            raise PacketError(f"packet has {what} {found!r} where {wanted!r} was expected")
    return payload


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy().data)
