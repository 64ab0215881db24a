"""What a codec is, and the packet it makes: a message as one self-describing buffer of bytes.

A codec is a chain of stages. Each stage makes smaller tensors of those it is given: floating ones, which the next
stage may make smaller still, and uint8 ones, which are finished. What is left at the end is the packet's payload.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Messages and packets are new memory each time; torch then takes it in huge pages, which costs a tenth.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

Packet = Tensor
"""One contiguous uint8 tensor: a header of 24 bytes, a table of the parts of each stage, then the last one's parts."""

MAGIC = b"FARF"
VERSION = 1
_HEADER = struct.Struct("<4sHHIQI")  # magic, version, codec id, shapes hash, payload length, checksum
_WORD = 8
_DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NUMEL_BITS = 48


class PacketError(ValueError):
    """A packet cannot be read: truncated, altered, or made by another version, codec or model."""


class NotFinite(ValueError):
    """A message holds NaN or infinity, which never travel."""


class Codec:
    """Turns the tensors of a message into a packet and back.

    A codec may remember things between its messages: every stream of messages needs a copy of its own, and what it
    remembers is in `state_dict`. Those that remember nothing leave the last five methods as they are. Who puts codecs
    to use asks what they can do (`lossless`, `needs_receiver`), never what they are.
    """

    @property
    def lossless(self) -> bool:
        """Whether each float32 value comes back as it was sent; such messages may be averaged without a codec."""
        return False

    @property
    def needs_receiver(self) -> bool:
        """Whether `decode` reads a packet by the receiver's own values, so that no two receivers read quite the same.

        Then `like` must hold them, and members of a group cannot end a round alike.
        """
        return False

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """The tensors as one packet, on their device. Raises NotFinite."""
        raise NotImplementedError

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """New tensors of the shapes and dtypes of `like`, which may also be the receiver's own. Raises PacketError."""
        raise NotImplementedError

    def error_of(self, packet: Packet, tensors: Sequence[Tensor]) -> float:
        """How much of a message its packet, just encoded, leaves out: |x - decode(packet)| / |x|, Euclidean norms."""
        decoded = self.decode(packet, tensors)
        missing = norm([tensor - sent for tensor, sent in zip(tensors, decoded, strict=True)])
        return missing / max(norm(tensors), 1e-30)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered: tensors, numbers and containers of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remembers what a `state_dict` says."""

    def seed(self, seed: int) -> None:
        """Gives a stream of random numbers its seed, where there is one."""

    def shrink_to(self, share: float) -> None:
        """Sends less from now on: `share` (0 to 1) of what the codec was made for, where it can."""

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """Says what a message is like that brings no news; all members of the group hold the same."""


def norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all values together."""
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))


class Stage(Codec):
    """One step of compression: a codec by itself, or joined to another with `|`."""

    def shrink(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Smaller flat tensors: floating ones that a later stage may shrink, and finished ones of bytes."""
        raise NotImplementedError

    def restore(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """What `shrink` was given, as far as it can be had back. Raises PacketError."""
        raise NotImplementedError

    def __or__(self, other: Stage | Chain) -> Chain:
        return Chain((self, *other.stages))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """This one."""
        return (self,)

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        return encode(self.stages, tensors)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        return decode(self.stages, packet, like)


class Chain(Codec):
    """Stages one after the other: `LowRank(rank=64) | Quantize(bits=4)`."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages

    def __or__(self, other: Stage | Chain) -> Chain:
        return Chain((*self.stages, *other.stages))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.stages))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.stages == other.stages

    @property
    def lossless(self) -> bool:
        """See Codec."""
        return all(stage.lossless for stage in self.stages)

    @property
    def needs_receiver(self) -> bool:
        """See Codec."""
        return any(stage.needs_receiver for stage in self.stages)

    def encode(self, tensors: Sequence[Tensor]) -> Packet:
        """See Codec."""
        return encode(self.stages, tensors)

    def decode(self, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        """See Codec."""
        return decode(self.stages, packet, like)

    def state_dict(self) -> dict[str, Any]:
        """Each stage's."""
        return {str(number): stage.state_dict() for number, stage in enumerate(self.stages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        for number, stage in enumerate(self.stages):
            stage.load_state_dict(state[str(number)])

    def seed(self, seed: int) -> None:
        """See Codec."""
        for number, stage in enumerate(self.stages):
            stage.seed(seed + number)

    def shrink_to(self, share: float) -> None:
        """See Codec."""
        for stage in self.stages:
            stage.shrink_to(share)

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """See Codec: only the first stage sees messages."""
        self.stages[0].expect(tensors)


def encode(stages: Sequence[Stage], tensors: Sequence[Tensor]) -> Packet:
    """Runs a message through the stages, and packs what is left."""
    if not all(finite(tensor) for tensor in tensors):
        raise NotFinite("the message holds NaN or infinity; it was not sent")
    table: list[list[Tensor]] = []
    parts = list(tensors)
    for stage in stages:
        parts = [part.detach().reshape(-1) for part in stage.shrink(parts)]
        table.append(parts)
    return pack(stages, tensors, table)


def decode(stages: Sequence[Stage], packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
    """Unpacks, and runs the stages backwards."""
    parts, table = unpack(stages, packet, like)
    try:
        for stage, wanted in zip(reversed(stages), [*reversed(table[:-1]), like], strict=True):
            parts = stage.restore(parts, wanted)
    except PacketError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        # A packet is a stranger's word: whatever a stage stumbles over is the packet's fault.
        raise PacketError(f"packet cannot be read: {error}") from error
    if not all(finite(part) for part in parts):
        raise PacketError("packet holds values that are not finite")
    return [_fit(part, tensor.dtype) for part, tensor in zip(parts, like, strict=True)]


def _fit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`; what is beyond its range becomes its largest number."""
    if tensor.dtype == dtype:
        return tensor
    most = torch.finfo(dtype).max
    return tensor.to(dtype) if most > torch.finfo(tensor.dtype).max else tensor.clamp(-most, most).to(dtype)


def finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or NaN, in one pass and without a temporary of the tensor's size."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def shapes_hash(tensors: Sequence[Tensor]) -> int:
    """A 32-bit checksum of the shapes, by which two replicas notice that their models differ."""
    return zlib.crc32(repr([tuple(tensor.shape) for tensor in tensors]).encode())


def codec_id(stages: Sequence[object]) -> int:
    """16 bits that stand for a codec and its settings."""
    return zlib.crc32(" | ".join(map(repr, stages)).encode()) & 0xFFFF


def pack(stages: Sequence[object], tensors: Sequence[Tensor], table: Sequence[Sequence[Tensor]]) -> Packet:
    """The last stage's parts behind a header; all begin at multiples of 8 bytes, so that they can be read in place."""
    words = [len(table)]
    for parts in table:
        words += [len(parts), *(_DTYPES.index(part.dtype) << _NUMEL_BITS | part.numel() for part in parts)]
    device = table[-1][0].device
    pieces = [_bytes(struct.pack(f"<{len(words)}Q", *words)).to(device)]
    for part in table[-1]:
        pieces += [part.view(torch.uint8), torch.zeros(-part.nbytes % _WORD, dtype=torch.uint8, device=device)]
    packet = torch.cat([torch.empty(_HEADER.size, dtype=torch.uint8, device=device), *pieces])
    payload = packet[_HEADER.size :]
    fields = MAGIC, VERSION, codec_id(stages), shapes_hash(tensors), payload.numel(), _checksum(payload)
    packet[: _HEADER.size] = _bytes(_HEADER.pack(*fields)).to(device)
    return packet


def unpack(stages: Sequence[object], packet: Packet, like: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The last stage's parts, and what the parts of every stage are like. Raises PacketError, saying what is wrong."""
    if packet.numel() < _HEADER.size:
        raise PacketError(f"packet of {packet.numel()} bytes is shorter than its header ({_HEADER.size})")
    header = packet[: _HEADER.size].cpu().numpy().tobytes()
    payload = packet[_HEADER.size :]
    magic, version, codec, shapes, length, checksum = _HEADER.unpack(header)
    expected = (
        ("magic", magic, MAGIC),
        ("version", version, VERSION),
        ("codec", codec, codec_id(stages)),
        ("shapes hash", shapes, shapes_hash(like)),
        ("payload length", payload.numel(), length),
        ("checksum", _checksum(payload), checksum),
    )
    for what, found, wanted in expected:
        if found != wanted:
            raise PacketError(f"packet has {what} {found!r} where {wanted!r} was expected")
    table, begin = _read_table(payload, len(stages))
    parts = []
    for part in table[-1]:
        end = begin + part.numel() * part.element_size()
        if end > payload.numel():
            raise PacketError("packet is shorter than its table says")
        # A view of other numbers must begin at a multiple of their size in memory, which a slice of a buffer may not.
        raw = payload[begin:end]
        aligned = raw.storage_offset() % _WORD == 0
        parts.append((raw if aligned else raw.clone()).view(part.dtype))
        begin = end + -end % _WORD
    if begin != payload.numel():
        raise PacketError("packet is longer than its table says")
    return parts, table


def _read_table(payload: Tensor, stages: int) -> tuple[list[list[Tensor]], int]:
    """The parts of each stage as tensors without storage, and where the table ends."""
    words = _words(payload)
    try:
        if next(words) != stages:
            raise PacketError("packet has another number of stages")
        table = [[_like(next(words)) for _ in range(next(words))] for _ in range(stages)]
    except StopIteration:
        raise PacketError("packet ends within its table") from None
    return table, _WORD * (1 + sum(1 + len(parts) for parts in table))


def _words(payload: Tensor) -> Iterator[int]:
    for begin in range(0, payload.numel() - _WORD + 1, _WORD):
        yield struct.unpack("<Q", payload[begin : begin + _WORD].cpu().numpy().tobytes())[0]


def _like(word: int) -> Tensor:
    code = word >> _NUMEL_BITS
    if code >= len(_DTYPES):
        raise PacketError(f"packet has numbers of an unknown kind ({code})")
    return torch.empty(word & ((1 << _NUMEL_BITS) - 1), dtype=_DTYPES[code], device="meta")


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _checksum(payload: Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy().data)
