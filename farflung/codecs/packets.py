"""Packets: a message as one self-describing buffer of bytes, and how it is read without trust."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Packet = Tensor
"""One contiguous uint8 tensor in the host's memory: a header of 24 bytes, a table of each transform's parts, then the
last one's parts."""

HOST = torch.device("cpu")

MAGIC = b"FARF"
VERSION = 3
_HEADER = struct.Struct("<4sHHIQI")  # magic, version, codec id, shapes hash, payload length, checksum
_WORD = 8
_DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64)
# A part in the table: what its numbers are, the values of a chunk (0 where there are none), and how many of either.
_KIND_SHIFT, _WIDTH_SHIFT = 60, 40


class PacketError(ValueError):
    """A packet cannot be read: truncated, altered, or made by another version, codec or model."""


def shapes_hash(tensors: Sequence[Tensor]) -> int:
    """A 32-bit checksum of the shapes, by which two replicas notice that their models differ."""
    return zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())


def codec_id(codecs: Sequence[object]) -> int:
    """16 bits that stand for a codec and its settings."""
    return zlib.crc32(" | ".join(map(described, codecs)).encode()) & 0xFFFF


def described(thing: object) -> str:
    """What a codec, or another choice of a method, is: equal in all processes. Where it lies in memory is no part."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def pack(codecs: Sequence[object], tensors: Sequence[Tensor], table: Sequence[Sequence[Tensor]]) -> Packet:
    """The last parts behind a header; all begin at multiples of 8 bytes, so that they can be read in place.

    Parts from another device come in one copy.
    """
    words = [len(table)]
    for parts in table:
        words += [len(parts), *map(_word, parts)]
    pieces = []
    for part in table[-1]:
        rest = torch.zeros(-part.nbytes % _WORD, dtype=torch.uint8, device=part.device)
        pieces += [part.reshape(-1).contiguous().view(torch.uint8), rest]
    begin = _HEADER.size + _WORD * len(words)
    pinned = bool(pieces) and pieces[0].device.type == "cuda"  # into such memory a GPU copies by itself
    packet = torch.empty(packed_nbytes(table), dtype=torch.uint8, pin_memory=pinned)
    if pieces and packet.device == pieces[0].device:
        torch.cat(pieces, out=packet[begin:])
    elif pieces:
        packet[begin:] = torch.cat(pieces)
    packet[_HEADER.size : begin] = _bytes(struct.pack(f"<{len(words)}Q", *words))
    payload = packet[_HEADER.size :]
    fields = MAGIC, VERSION, codec_id(codecs), shapes_hash(tensors), payload.numel(), _checksum(payload)
    packet[: _HEADER.size] = _bytes(_HEADER.pack(*fields))
    return packet


def packed_nbytes(table: Sequence[Sequence[Tensor]]) -> int:
    """The bytes of a packet whose parts are like these, which need no memory."""
    words = 1 + sum(1 + len(parts) for parts in table)
    return _HEADER.size + _WORD * words + sum(part.nbytes + -part.nbytes % _WORD for part in table[-1])


def unpack(
    codecs: Sequence[object], packet: Packet, like: Sequence[Tensor], device: torch.device = HOST
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The last parts, and what the parts of every transform are like. Raises PacketError, saying what is wrong.

    It is read in the host's memory; all parts go to a device in one copy.
    """
    packet = packet.to(HOST)
    if packet.numel() < _HEADER.size:
        raise PacketError(f"packet of {packet.numel()} bytes is shorter than its header ({_HEADER.size})")
    header = packet[: _HEADER.size].numpy().tobytes()
    payload = packet[_HEADER.size :]
    magic, version, codec, shapes, length, checksum = _HEADER.unpack(header)
    expected = (
        ("magic", magic, MAGIC),
        ("version", version, VERSION),
        ("codec", codec, codec_id(codecs)),
        ("shapes hash", shapes, shapes_hash(like)),
        ("payload length", payload.numel(), length),
        ("checksum", _checksum(payload), checksum),
    )
    for what, found, wanted in expected:
        if found != wanted:
            raise PacketError(f"packet has {what} {found!r} where {wanted!r} was expected")
    table, begin = _read_table(payload, len(codecs))
    payload = payload.to(device)
    parts = []
    for part in table[-1]:
        end = begin + part.numel() * part.element_size()
        if end > payload.numel():
            raise PacketError("packet is shorter than its table says")
        # A view of other numbers must begin at a multiple of their size in memory, which a slice of a buffer may not.
        raw = payload[begin:end]
        aligned = raw.storage_offset() % _WORD == 0
        parts.append((raw if aligned else raw.clone()).view(part.dtype).view(part.shape))
        begin = end + -end % _WORD
    if begin != payload.numel():
        raise PacketError("packet is longer than its table says")
    return parts, table


def split_packets(packets: Packet, count: int) -> list[Packet]:
    """So many packets that lie one behind the other. Raises PacketError."""
    found: list[Packet] = []
    packets, begin = packets.to(HOST), 0
    for _ in range(count):
        header = packets[begin : begin + _HEADER.size].numpy().tobytes()
        if len(header) < _HEADER.size:
            raise PacketError(f"{len(found)} packets came where {count} were expected")
        length = _HEADER.size + _HEADER.unpack(header)[4]
        found.append(packets[begin : begin + length])
        begin += length
    if begin != packets.numel():
        raise PacketError(f"{packets.numel()} bytes came where {count} packets have {begin}")
    return found


def _read_table(payload: Tensor, steps: int) -> tuple[list[list[Tensor]], int]:
    """The parts of each transform as tensors without storage, and where the table ends."""
    words = _words(payload)
    try:
        if next(words) != steps:
            raise PacketError("packet has another number of transforms")
        table = [[_like(next(words)) for _ in range(next(words))] for _ in range(steps)]
    except StopIteration:
        raise PacketError("packet ends within its table") from None
    return table, _WORD * (1 + sum(1 + len(parts) for parts in table))


def _words(payload: Tensor) -> Iterator[int]:
    for begin in range(0, payload.numel() - _WORD + 1, _WORD):
        yield struct.unpack("<Q", payload[begin : begin + _WORD].numpy().tobytes())[0]


def _word(part: Tensor) -> int:
    """A part's place in the table."""
    count, width = (part.numel(), 0) if part.dim() < 2 else part.shape
    return _DTYPES.index(part.dtype) << _KIND_SHIFT | width << _WIDTH_SHIFT | count


def _like(word: int) -> Tensor:
    code, width = word >> _KIND_SHIFT, word >> _WIDTH_SHIFT & ((1 << (_KIND_SHIFT - _WIDTH_SHIFT)) - 1)
    count = word & ((1 << _WIDTH_SHIFT) - 1)
    if code >= len(_DTYPES):
        raise PacketError(f"packet has numbers of an unknown kind ({code})")
    return torch.empty((count, width) if width else (count,), dtype=_DTYPES[code], device="meta")


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.numpy().data)
