"""How two peers prove to each other that they belong to the run, before either reads anything else."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from farflung.networks.internet.contact.host import Streams
from farflung.networks.internet.contact.streams import RequestRefusedError, accepted
from farflung.networks.peers.admission import check_clock, clock_fault, disagreement
from farflung.networks.peers.frames import (
    Frame,
    FrameError,
    entry,
    name_in,
    number,
    read_frame,
    write_frame,
)
from farflung.networks.peers.member import Member, member_in
from farflung.networks.peers.ticket import Ticket

HELLO = "hello"
"""The kind of the frame that opens a handshake."""
LARGEST_HELLO = 1 << 15
"""Bytes of a frame of one who has not proven yet that it is a member."""


class StrangerError(FrameError):
    """The caller does not know the run's secret."""


class Handshake:
    """One peer's side: both prove that they know the secret, for these two and now; only then they say who they are."""

    def __init__(self, ticket: Ticket, own: str, info: Frame, record: Callable[[], Frame]) -> None:
        self._ticket = ticket
        self._own = own
        self._info = info
        self._record = record

    async def open(self, peer: str, streams: Streams) -> Member:
        """Proves membership to a peer, and has it prove its own. Raises StrangerError and UserError."""
        reader, writer = streams
        ours = secrets.token_hex(16)
        await write_frame(writer, {"kind": HELLO, "nonce": ours})
        answer = await read_frame(reader)
        theirs = entry(answer, "nonce", str)
        self._check(answer, "answer", ours, theirs, self._own, peer)
        asked = time.time()
        proof = self._ticket.proof("ask", theirs, ours, self._own, peer)
        await write_frame(writer, {"proof": proof, **self._record()})
        welcome = accepted(await read_frame(reader))
        check_clock(number(entry(welcome, "about", dict).get("time")), asked, time.time())
        member = _from(peer, member_in(welcome))
        member.sees = name_in(welcome, "seen") if "seen" in welcome else ""
        return member

    async def answer(self, hello: Frame, peer: str, streams: Streams) -> Member:
        """Proves membership to one who opens, and has it prove its own; the own record then ends the handshake.

        Raises StrangerError, and RequestRefusedError for one that cannot train with the run.
        """
        reader, writer = streams
        ours, theirs = secrets.token_hex(16), entry(hello, "nonce", str)
        proof = self._ticket.proof("answer", theirs, ours, peer, self._own)
        await write_frame(writer, {"nonce": ours, "proof": proof})
        told = await read_frame(reader, LARGEST_HELLO)
        self._check(told, "ask", ours, theirs, peer, self._own)
        about = entry(told, "about", dict)
        why = disagreement(about, self._info) or clock_fault(number(about.get("time")) - time.time())
        if why:
            raise RequestRefusedError(why)
        return _from(peer, member_in(told))

    def _check(self, told: Frame, *parts: str) -> None:
        if not self._ticket.proves(told.get("proof"), *parts):
            raise StrangerError("it does not know the run's secret")


def _from(peer: str, member: Member) -> Member:
    """A member that speaks of itself. Raises FrameError when that is another one."""
    if member.peer != peer:
        raise FrameError("a peer says that it is another one")
    return member
