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
from farflung.networks.internet.lines import PROMPT_SECONDS, Line, RequestRefusedError, accepted
from farflung.networks.internet.members import Member
from farflung.networks.internet.swarm import Swarm

PROBE = 1 << 22
"""Bytes that are sent each way to measure a link."""
PROBES_A_MINUTE = 6


def answer_probes(swarm: Swarm) -> None:
    """Lets members measure their links to this peer, a few times a minute."""
    asked: list[float] = []

    async def on_probe(line: Line, frame: Frame) -> None:
        size, now = entry(frame, "size", int), time.monotonic()
        asked[:] = [moment for moment in asked if now - moment < 60]
        if len(asked) >= PROBES_A_MINUTE:
            raise RequestRefusedError("this peer was measured often enough in this minute")
        if not 0 <= size <= PROBE:
            raise FrameError("a probe is too large")
        asked.append(now)
        await write_frame(line.writer, {"go": True})
        buffer = memoryview(bytearray(size))
        await read_payload(line.reader, buffer, PROMPT_SECONDS, 1e3)
        await write_payload(line.writer, buffer, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            await line.reader.read(1)

    swarm.handlers["probe"] = on_probe


async def measured(swarm: Swarm, member: Member) -> tuple[float, float]:
    """Megabits a second to a member, and back from it. Raises as `Swarm.line`, and RequestRefusedError."""
    content = memoryview(bytearray(os.urandom(PROBE)))
    async with swarm.line(member) as line:
        await write_frame(line.writer, {"kind": "probe", "size": PROBE})
        async with asyncio.timeout(PROMPT_SECONDS):
            accepted(await read_frame(line.reader))
        began = time.monotonic()
        await write_payload(line.writer, content, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            first = await line.reader.readexactly(1)
        turned = time.monotonic()
        await read_payload(line.reader, content[len(first) :], PROMPT_SECONDS, 1e3)
        ended = time.monotonic()
    return PROBE * 8e-6 / (turned - began), PROBE * 8e-6 / (ended - turned)
