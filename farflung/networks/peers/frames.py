"""Frames: a length and a small JSON object; each request and answer between peers starts with one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any

Frame = dict[str, Any]
LARGEST_FRAME = 1 << 16
LARGEST_NUMBER = 1e300
LONGEST_NAME = 512
"""Letters of what others name and a peer keeps."""
SLOWEST = 2e4
"""The least average bytes a second of a transfer."""
_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 18


class FrameError(ValueError):
    """A frame is invalid: too long, no JSON object, or without a field."""


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """A context (or decorator) for reading what a peer has sent: any error becomes a FrameError."""
    try:
        yield
    except FrameError:
        raise
    except Exception as error:
        raise FrameError(f"{what} cannot be read: {error}") from error


async def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Sends one frame."""
    writer.write(encoded(frame))
    await writer.drain()


def encoded(frame: Frame) -> bytes:
    """A frame as bytes."""
    text = json.dumps(frame, separators=(",", ":")).encode()
    if len(text) > LARGEST_FRAME:
        raise FrameError(f"a frame of {len(text)} bytes is too long to send")
    return _LENGTH.pack(len(text)) + text


async def read_frame(reader: asyncio.StreamReader, largest: int = LARGEST_FRAME) -> Frame:
    """Receives one frame. Raises FrameError, and EOFError when the stream ends before it does."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > largest:
        raise FrameError(f"a frame says that it has {length} bytes; at most {largest} are read")
    return parsed(await reader.readexactly(length))


@reading("a frame")
def parsed(text: str | bytes) -> Frame:
    """The frame that a text is. Raises FrameError."""
    frame = told_in(text)
    if not isinstance(frame, dict):
        raise FrameError("a frame is no JSON object")
    return frame


def told_in(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError, also where it could not be handed on: for half a character, or infinity."""
    told = json.loads(text, parse_constant=_not_json)
    json.dumps(told, ensure_ascii=False, allow_nan=False).encode()
    return told


def _not_json(name: str) -> None:
    raise FrameError(f"{name} is no number of JSON's")


def entry(frame: Frame, name: str, kind: type) -> Any:
    """A field of a frame. Raises FrameError when it is missing or of another type."""
    value = frame.get(name)
    if type(value) is not kind:
        raise FrameError(f"a frame's {name!r} is missing or no {kind.__name__}")
    return value


def name_in(frame: Frame, name: str, longest: int = LONGEST_NAME) -> str:
    """A field of a frame that is a text short enough to be kept. Raises FrameError."""
    value: str = entry(frame, name, str)
    if len(value) > longest:
        raise FrameError(f"a frame's {name!r} has more than {longest} letters")
    return value


def whole(value: object, most: float) -> int:
    """A whole number from 0 to `most`. Raises FrameError when it is none."""
    if type(value) is not int or not 0 <= value <= most:
        raise FrameError(f"{value!r:.40} is no whole number from 0 to {most}")
    return value


def number(value: object, least: float = 0.0, most: float = LARGEST_NUMBER) -> float:
    """A finite number from `least` to `most`. Raises FrameError when it is none."""
    if not (type(value) in (int, float) and least <= value <= most):  # type: ignore[operator]
        raise FrameError(f"{value!r:.40} is no number from {least:g} to {most:g}")
    return float(value)  # type: ignore[arg-type]


def plain(text: str) -> str:
    """A peer's text made safe to show: one short line without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text[:300].split()))


async def write_payload(writer: asyncio.StreamWriter, payload: memoryview, stall: float) -> None:
    """Sends bytes, in pieces. Raises TimeoutError when nothing moves for `stall` seconds."""
    for begin in range(0, len(payload), _CHUNK):
        writer.write(payload[begin : begin + _CHUNK])
        async with asyncio.timeout(stall):
            await writer.drain()


async def read_payload(reader: asyncio.StreamReader, into: memoryview, stall: float, slowest: float) -> None:
    """Fills `into`. Raises EOFError when the stream ends before.

    Raises TimeoutError when nothing comes for `stall` seconds, or less than `slowest` bytes a second over all.
    """
    position, loop = 0, asyncio.get_running_loop()
    began = loop.time()
    while position < len(into):
        async with asyncio.timeout(stall):
            piece = await reader.read(min(_CHUNK, len(into) - position))
        if not piece:
            raise EOFError(f"the stream ended after {position} of {len(into)} bytes")
        into[position : position + len(piece)] = piece
        position += len(piece)
        if loop.time() - began > stall + position / slowest:
            raise TimeoutError(f"only {position} bytes came in {loop.time() - began:.0f} s")


def digest(content: memoryview) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
