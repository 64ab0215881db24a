"""What a machine needs to take part in a run, looked at one after the other; each finding says what to fix."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from farflung.config import UserError
from farflung.networks.internet.frames import Frame, FrameError, entry, read_frame, read_payload, write_frame
from farflung.networks.internet.frames import write_payload as write_bytes
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.members import Member
from farflung.networks.internet.network import InternetNetwork
from farflung.networks.internet.swarm import PROMPT_SECONDS, Line, Refused, Swarm, accepted

PROBE = 1 << 22
"""Bytes that are sent each way to measure a link."""
PROBES_A_MINUTE = 6


class Finding(NamedTuple):
    """One thing that was looked at."""

    good: bool
    text: str


def answer_probes(swarm: Swarm) -> None:
    """Lets members measure their links to this peer, a few times a minute."""
    asked: list[float] = []

    async def on_probe(line: Line, frame: Frame) -> None:
        size, now = entry(frame, "size", int), time.monotonic()
        asked[:] = [moment for moment in asked if now - moment < 60]
        if len(asked) >= PROBES_A_MINUTE:
            raise Refused("this peer was measured often enough in this minute")
        if not 0 <= size <= PROBE:
            raise FrameError("a probe is too large")
        asked.append(now)
        await write_frame(line.writer, {"go": True})
        buffer = memoryview(bytearray(size))
        await read_payload(line.reader, buffer, PROMPT_SECONDS, 1e3)
        await write_bytes(line.writer, buffer, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            await line.reader.read(1)

    swarm.handlers["probe"] = on_probe


def examine(network: InternetNetwork) -> Iterator[Finding]:
    """What is found of one that has just joined."""
    swarm = network.swarm
    yield from _reachability(swarm)
    training = swarm.members.training()
    yield Finding(True, f"{len(training)} peers train; {len(swarm.members.by_rank)} were heard of")
    for member in swarm.members.all():
        yield swarm.run(_link(swarm, member), 10 * PROMPT_SECONDS)


def _reachability(swarm: Swarm) -> Iterator[Finding]:
    hosts = [address.split("/")[2] for address in swarm.about["addresses"] if address.startswith("/ip4/")]
    listed = ", ".join(swarm.about["addresses"]) or "no address"
    if any(ipaddress.ip_address(host).is_global for host in hosts):
        yield Finding(True, f"this machine can be reached at {listed}")
    elif any("/p2p-circuit" in address for address in swarm.about["addresses"]):
        yield Finding(True, f"this machine is behind NAT; others reach it through a relay: {listed}")
    else:
        yield Finding(
            True,
            f"this machine has private addresses only ({listed}): those on the same network reach it; others do after "
            "it has called them, or with a port forwarded to it and --port and --announce",
        )


async def _link(swarm: Swarm, member: Member) -> Finding:
    """How well a peer can be reached: round trip, and both directions of the link."""
    try:
        began = time.monotonic()
        await swarm.greet(member.peer)
        greeted = time.monotonic()
        up, down = await _measured(swarm, member)
    except (*UNREACHABLE, Refused, FrameError) as error:
        where = ", ".join(member.addresses) or "no address"
        reason = str(error) or "no answer"
        remedy = "see that it runs and that no firewall is in between"
        return Finding(False, f"{member.described} at {where}: {reason}; {remedy}")
    except UserError as error:
        return Finding(False, f"{member.described}: {error}")
    round_trip = (greeted - began) / 3 * 1e3
    return Finding(
        True, f"{member.described}: {round_trip:.0f} ms there and back, {up:.0f} Mbit/s to it, {down:.0f} back"
    )


async def _measured(swarm: Swarm, member: Member) -> tuple[float, float]:
    content = memoryview(bytearray(os.urandom(PROBE)))
    async with swarm.line(member) as line:
        await write_frame(line.writer, {"kind": "probe", "size": PROBE})
        async with asyncio.timeout(PROMPT_SECONDS):
            accepted(await read_frame(line.reader))
        began = time.monotonic()
        await write_bytes(line.writer, content, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            first = await line.reader.readexactly(1)
        turned = time.monotonic()
        await read_payload(line.reader, content[len(first) :], PROMPT_SECONDS, 1e3)
        ended = time.monotonic()
    return PROBE * 8e-6 / (turned - began), PROBE * 8e-6 / (ended - turned)
