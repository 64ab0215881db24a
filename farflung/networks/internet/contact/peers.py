"""The peers of a run: a libp2p host, in a thread of its own, that only members may talk to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from farflung.errors import UserError
from farflung.formats import PROTOCOL
from farflung.networks.internet.contact.background import Background
from farflung.networks.internet.contact.directory import Directory
from farflung.networks.internet.contact.frames import LARGEST_FRAME, Frame, FrameError, entry, read_frame, write_frame
from farflung.networks.internet.contact.guard import Guard
from farflung.networks.internet.contact.handshake import HELLO, LARGEST_HELLO, Handshake, StrangerError
from farflung.networks.internet.contact.host import UNREACHABLE, Host, NobodyAnswersError, Streams, peers_at
from farflung.networks.internet.contact.identity import Identity, rank_of
from farflung.networks.internet.contact.members import Member, Members
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, Handler, PeerStream, RequestRefusedError
from farflung.networks.internet.contact.ticket import Ticket
from farflung.networks.listening import ListenAddress
from farflung.scoped import quiet

log = logging.getLogger(__name__)

UNKNOWN_SECONDS = 5.0
"""How long a peer is waited for that others of the group have heard of first."""

TRIES = 2
"""How often a newcomer tries: a link may lose packets, and a busy peer be slow to answer."""


class Peers:
    """The known peers and how to reach them; `doors` are other processes of peers that are islands.

    Args:
        info: what others must agree to (see `disagreement`), and facts for `farflung status`.
        tell: told in one line what a user should know.
        first: whether it starts the run, or starts it again, and calls nobody.
        listed: whether others are to know of it.
    """

    def __init__(
        self,
        ticket: Ticket,
        identity: Identity,
        local: ListenAddress,
        info: Frame,
        tell: Callable[[str], None] = log.warning,
        first: bool = False,
        listed: bool = True,
    ) -> None:
        self.ticket = ticket
        self.identity = identity
        self.guard = Guard(tell)
        self.members = Members(self.guard.bans)
        self.doors: dict[int, Member] = {}
        self.handlers: dict[str, Handler] = {}
        self.info: Frame = {
            "protocol": PROTOCOL.version,
            "rank": identity.rank,
            "public": identity.public,
            "session": os.urandom(8).hex(),
            "addresses": [],
            "beat": 0,
            "step": 0,
            "rate": 0.0,
            "facts": {},
            "doors": 0,
            "door_of": None,
            **info,
        }
        self.background = Background(tell)
        self.tell = tell
        self._bootstrap = () if first else ticket.addresses
        self._listed = listed
        self._handshake = Handshake(ticket, identity, self.info)
        self._proven: dict[str, Member] = {}
        self._quiet = contextlib.ExitStack()
        self._host = Host(local, identity, f"farflung/1/{ticket.run}")

    def start(self, deadline_s: float) -> None:
        """Takes its place. Raises UserError."""
        if "HIVEMIND_LOGLEVEL" not in os.environ:
            self._quiet.enter_context(quiet("hivemind"))  # what concerns a user, farflung says
        self.background.start()
        try:
            self.background.run(self._start(deadline_s), deadline_s + 30)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves."""
        self.background.end(self._stop())
        self._quiet.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """This peer's addresses, then the others', for tickets."""
        others = (address for member in self.members.all() if member.alive for address in member.addresses)
        return tuple(dict.fromkeys((*self.info["addresses"], *others)))

    async def found(self, rank: int, seconds: float) -> Member | None:
        """Who has a rank; one that others have heard of first is waited for, and so many seconds at most."""
        for _ in range(int(min(UNKNOWN_SECONDS, seconds) * 10)):
            if member := self.members.by_rank.get(rank) or self.doors.get(rank):
                return member
            await asyncio.sleep(0.1)
        return None

    @contextlib.asynccontextmanager
    async def stream(self, member: Member) -> AsyncIterator[PeerStream]:
        """A stream to a member, once both have proven that they are. Raises RequestRefusedError and UNREACHABLE."""
        proven = self._proven.get(member.peer)
        if proven is None or proven.session != member.session:  # one that has come back has forgotten who proved what
            try:
                await self.handshake(member.peer)
            except FrameError as error:
                self.guard.strike(member.peer, "bad handshake", str(error))
                raise RequestRefusedError(str(error)) from error
            except UserError as error:  # a peer that cannot be asked is no reason to stop training
                raise RequestRefusedError(str(error)) from error
        async with self._open(member.peer) as streams:
            yield PeerStream(member, *streams)

    async def ask(self, member: Member, request: Frame, deadline_s: float = PROMPT_SECONDS) -> Frame:
        """A member's answer to a request. Raises as `stream`, and RequestRefusedError."""
        async with asyncio.timeout(deadline_s), self.stream(member) as stream:
            await stream.tell(request)
            return await stream.hear(deadline_s)

    async def handshake(self, peer: str, addresses: Sequence[str] = ()) -> Member:
        """Proves membership to a peer, and has it prove its own; it may be at some addresses, if it is not known.

        Raises as `stream`, and UserError.
        """
        async with asyncio.timeout(PROMPT_SECONDS), self._open(peer, addresses) as streams:
            return self._admit(await self._handshake.open(peer, streams))

    async def announce(self, **info: Any) -> None:
        """Says of itself what the others should not only hear at the next beat, and hears of them."""
        self.info.update(info)
        others = [self.handshake(member.peer) for member in self.members.all() if member.alive]
        await asyncio.gather(*others, return_exceptions=True)  # who does not answer reads it in the directory

    async def _start(self, deadline_s: float) -> None:
        for left in reversed(range(TRIES)):
            try:
                self.info["addresses"] = await self._host.start(self._bootstrap, self._on_stream, deadline_s)
                if self._bootstrap:
                    await self._find_members()
                break
            except NobodyAnswersError:
                await self._host.stop()
                if not left:
                    raise
        if self.info["door_of"] is None:  # a door is told of those that it meets
            self._directory = await Directory.open(self, self._host.p2p, self._bootstrap, self._listed)
            await self._directory.beat()
            self.background.keep("finding others", self._directory.go_on)

    async def _find_members(self) -> None:
        """Calls the peers of the ticket; one that answers is enough. Raises UserError."""
        peers = peers_at(self._bootstrap)
        answers = await asyncio.gather(
            *(self.handshake(peer) for peer in peers if peer != self.identity.peer), return_exceptions=True
        )
        if any(isinstance(answer, Member) for answer in answers):
            return
        for answer in answers:
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, RequestRefusedError):
                raise UserError(f"the run's peers refuse this one: {answer}") from answer
        if any("protocols not supported" in str(answer) or isinstance(answer, StrangerError) for answer in answers):
            raise UserError(
                "the peers at the ticket's addresses are not of this run, or the ticket's secret is wrong; "
                "ask for a new ticket"
            )
        raise NobodyAnswersError(self._bootstrap)

    def _open(self, peer: str, addresses: Sequence[str] = ()) -> AbstractAsyncContextManager[Streams]:
        member = self.members.of_peer(peer) or self.doors.get(rank_of(peer))
        known = member.addresses if member else addresses or self.ticket.addresses
        return self._host.stream(peer, known, PROMPT_SECONDS)

    def _admit(self, member: Member) -> Member:
        self._proven[member.peer] = member
        if member.door_of is None:
            self.members.hear(member)
        return member

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(info.peer_id)
        member, liable = self._proven.get(peer), self._liable(peer)
        proven = member is not None
        if self.guard.bans(liable) or not self.guard.admit(peer, proven):
            writer.close()
            return
        try:
            await self._heard(peer, member, (reader, writer), liable)
            await _discard(reader, LARGEST_FRAME << 10 if proven else LARGEST_HELLO)
        finally:
            self.guard.release(peer, proven)
            writer.close()

    async def _heard(self, peer: str, member: Member | None, streams: Streams, liable: str) -> None:
        """Answers a request, or refuses it and counts the offence."""
        try:
            await self._answer(peer, member, streams)
        except RequestRefusedError as refusal:
            await _refuse(streams[1], refusal)
        except TimeoutError:
            self.guard.refuse("too slow")
        except UNREACHABLE:
            pass  # who has gone meanwhile is missed by those who wait for it
        except Exception as error:
            if member is None:
                self.guard.refuse("stranger")
            else:
                self.guard.strike(liable, "bad request", str(error))
            await _refuse(streams[1], error)

    def _liable(self, peer: str) -> str:
        """Who answers for what a peer does: for a door the island that has named it, whatever it says itself."""
        door = self.doors.get(rank_of(peer))
        if door is None or door.peer != peer or door.door_of is None:
            return peer
        island = self.members.by_rank.get(door.door_of)
        return island.peer if island else peer

    async def _answer(self, peer: str, member: Member | None, streams: Streams) -> None:
        async with asyncio.timeout(PROMPT_SECONDS):
            frame = await read_frame(streams[0], LARGEST_FRAME if member else LARGEST_HELLO)
            if frame.get("kind") == HELLO:
                self._admit(await self._handshake.answer(frame, peer, streams))
                await write_frame(streams[1], self._handshake.welcome())
                return
        if member is None:
            raise StrangerError("it has not proven that it is a member")
        handler = self.handlers.get(entry(frame, "kind", str))
        if handler is None:
            raise FrameError(f"there is no request {frame['kind']!r:.40}")
        await handler(PeerStream(member, *streams), frame)

    async def _stop(self) -> None:
        if hasattr(self, "_directory"):
            with contextlib.suppress(Exception):
                await self._directory.close()
        await self._host.stop()


async def _discard(reader: asyncio.StreamReader, most: int) -> None:
    """Lets a caller's bytes run out until it has read its answer and closed; closing earlier could cut that off."""
    with contextlib.suppress(*UNREACHABLE):
        async with asyncio.timeout(PROMPT_SECONDS):
            while most > 0 and (content := await reader.read(LARGEST_FRAME)):
                most -= len(content)


async def _refuse(writer: asyncio.StreamWriter, why: Exception) -> None:
    with contextlib.suppress(*UNREACHABLE):
        async with asyncio.timeout(PROMPT_SECONDS):
            await write_frame(writer, {"refused": str(why)[:300]})
