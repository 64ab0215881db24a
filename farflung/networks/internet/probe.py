"""Measuring the link between two peers, by bytes that are sent there and back."""

from __future__ import annotations

import asyncio
import os
import time

from farflung.networks.internet.frames import (
    Frame,
    FrameError,
    entry,
    read_frame,
    read_payload,
    write_frame,
    write_payload,
)
from farflung.networks.internet.members import Member
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError, accepted

PROBE = 1 << 22
"""Bytes that are sent each way to measure a link."""
PROBES_A_MINUTE = 6


def answer_probes(peers: Peers) -> None:
    """Lets members measure their links to this peer, a few times a minute."""
    asked: list[float] = []

    async def on_probe(stream: PeerStream, frame: Frame) -> None:
        size, now = entry(frame, "size", int), time.monotonic()
        asked[:] = [moment for moment in asked if now - moment < 60]
        if len(asked) >= PROBES_A_MINUTE:
            raise RequestRefusedError("this peer was measured often enough in this minute")
        if not 0 <= size <= PROBE:
            raise FrameError("a probe is too large")
        asked.append(now)
        await write_frame(stream.writer, {"go": True})
        buffer = memoryview(bytearray(size))
        await read_payload(stream.reader, buffer, PROMPT_SECONDS, 1e3)
        await write_payload(stream.writer, buffer, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            await stream.reader.read(1)

    peers.handlers["probe"] = on_probe


async def measured(peers: Peers, member: Member) -> tuple[float, float]:
    """Megabits a second to a member, and back from it. Raises as `Peers.stream`, and RequestRefusedError."""
    content = memoryview(bytearray(os.urandom(PROBE)))
    async with peers.stream(member) as stream:
        await write_frame(stream.writer, {"kind": "probe", "size": PROBE})
        async with asyncio.timeout(PROMPT_SECONDS):
            accepted(await read_frame(stream.reader))
        began = time.monotonic()
        await write_payload(stream.writer, content, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            first = await stream.reader.readexactly(1)
        turned = time.monotonic()
        await read_payload(stream.reader, content[len(first) :], PROMPT_SECONDS, 1e3)
        ended = time.monotonic()
    return PROBE * 8e-6 / (turned - began), PROBE * 8e-6 / (ended - turned)
