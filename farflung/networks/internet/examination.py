"""Checks of what a machine needs to join a run; each finding says what to fix."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

from farflung.errors import UserError, counted
from farflung.findings import Finding
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.peers.addresses import is_global, is_loopback
from farflung.networks.peers.frames import Frame, FrameError, entry, plain, read_payload, write_payload
from farflung.networks.peers.member import Member

PROBE = 1 << 22
"""Bytes that are sent each way to measure a link."""
PROBES_A_MINUTE = 6


def examine(peers: Peers) -> Iterator[Finding]:
    """The checks of a peer that has just joined."""
    yield _reachability(peers)
    heard_of, answered = peers.members.all(), list[int]()
    for member in heard_of:
        link = peers.background.run(_link(peers, member), 12 * PROMPT_SECONDS)
        answered += [member.rank] * link.good
        yield link
    # What each has said of itself when it was asked.
    training = [rank for rank in answered if (told := peers.members.by_rank.get(rank)) and told.trains]
    were = "was" if len(heard_of) == 1 else "were"
    over = "" if training else "the run may be over, or nobody has begun: ask whoever invited you"
    yield Finding(True, f"{counted(len(training), 'peer')} in training; {len(heard_of)} {were} heard of", over)


def _reachability(peers: Peers) -> Finding:
    own = [address for address in peers.info["addresses"] if address.rpartition("/p2p/")[0] != peers.seen]
    listed = ", ".join(own) or "no address"
    if any(map(is_global, own)):
        return Finding(
            True, f"this machine has a public address ({listed}), where others reach it if no firewall is between"
        )
    if own and all(map(is_loopback, own)):
        alone = f"only programs on this machine reach this peer ({listed})"
        return Finding(True, alone, "for others to reach it, leave out --listen")
    private = f"this machine has private addresses only ({listed}): those on the same network reach it"
    remedy = "forward a port of the router to it, and give --port and --announce"
    if any(map(is_global, peers.addresses)):
        helped = f"{private}, others through the run's public peers"
        return Finding(True, helped, f"to be reached without them, {remedy}")
    elsewhere = f"{remedy}, or run farflung invite on a public machine"
    return Finding(True, f"{private}, nobody else: no peer has a public address", elsewhere)


async def _link(peers: Peers, member: Member) -> Finding:
    """How well a peer can be reached: round trip, and both directions of the link."""
    try:
        began = time.monotonic()
        await peers.handshake(member.peer)
        shaken = time.monotonic()
        async with asyncio.timeout(10 * PROMPT_SECONDS):
            up, down = await measured(peers, member)
    except (*UNREACHABLE, RequestRefusedError, FrameError) as error:
        where = f"{member.described} at {', '.join(member.addresses) or 'no address'}"
        remedy = "see that it runs and that no firewall is in between"
        return Finding(False, f"{where}: {plain(str(error)) or 'no answer'}", remedy)
    except UserError as error:
        return Finding(False, f"{member.described}: {plain(str(error))}")
    link = f"{(shaken - began) / 3 * 1e3:.0f} ms there and back, {up:.0f} Mbit/s to it, {down:.0f} back"
    return Finding(True, f"{member.described}: {link}")


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
        await stream.tell({"go": True})
        buffer = memoryview(bytearray(size))
        await read_payload(stream.reader, buffer, PROMPT_SECONDS, 1e3)
        await write_payload(stream.writer, buffer, PROMPT_SECONDS)
        await stream.hear_the_end(4 * PROMPT_SECONDS)

    peers.handlers["probe"] = on_probe


async def measured(peers: Peers, member: Member) -> tuple[float, float]:
    """Megabits a second to a member, and back from it. Raises as `Peers.stream`, and RequestRefusedError."""
    content = memoryview(bytearray(os.urandom(PROBE)))
    async with peers.stream(member) as stream:
        await stream.tell({"kind": "probe", "size": PROBE})
        await stream.hear()
        began = time.monotonic()
        await write_payload(stream.writer, content, PROMPT_SECONDS)
        async with asyncio.timeout(4 * PROMPT_SECONDS):
            first = await stream.reader.readexactly(1)
        turned = time.monotonic()
        await read_payload(stream.reader, content[len(first) :], PROMPT_SECONDS, 1e3)
        ended = time.monotonic()
    return PROBE * 8e-6 / (turned - began), PROBE * 8e-6 / (ended - turned)
