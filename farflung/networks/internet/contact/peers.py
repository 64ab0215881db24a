"""The peers of a run: a libp2p host, in a thread of its own, that only members may talk to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from farflung.errors import UserError
from farflung.formats import PROTOCOL
from farflung.networks.internet.contact.background import Background
from farflung.networks.internet.contact.gossip import Gossip
from farflung.networks.internet.contact.handshake import HELLO, LARGEST_HELLO, Handshake, StrangerError
from farflung.networks.internet.contact.host import UNREACHABLE, Host, Streams, text_of
from farflung.networks.internet.contact.knocking import find_members, find_members_if_any
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, Handler, PeerStream, RequestRefusedError
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.frames import LARGEST_FRAME, Frame, FrameError, entry, read_frame, write_frame
from farflung.networks.peers.guard import Guard
from farflung.networks.peers.identity import Identity, rank_of
from farflung.networks.peers.member import CLOCK_SECONDS, Member, signed
from farflung.networks.peers.members import Members
from farflung.networks.peers.ticket import Ticket
from farflung.scoped import quiet

log = logging.getLogger(__name__)

UNKNOWN_SECONDS = 5.0
"""How long a peer is waited for that others of the group have heard of first."""

UNPROVEN = "it has not proven that it is a member"
IN_TICKETS = 32
"""Members whose addresses a ticket holds."""
ANNOUNCED = 24
"""Members that are told at once of what is new."""
DAEMONS, DAEMON_SECONDS = 3, 600.0
"""A daemon that dies so often in so many seconds, or cannot start again, cannot be kept alive."""
AGAIN_SECONDS = 5.0
"""How long what hinders a daemon that cannot start has to pass."""
SILENT_SECONDS = 120.0
"""A member that does not answer, and was not heard of for so long, has gone: its machine may have lost its power."""
PROVEN = 4096
"""Peers at most of which this one remembers that they are members."""


class Peers:
    """The known peers and how to reach them; `doors` are other processes of peers that are islands.

    Args:
        info: what others must agree to (see `disagreement`), and facts for `farflung status`.
        tell: told in one line what a user should know.
        first: whether it starts the run, or starts it again, where nobody of the ticket answers at once.
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
        self.fault: UserError | None = None
        """Why this peer cannot stay in the run."""
        self.seen = ""
        """Where others see this peer, if a router is in front of it."""
        self.doors: dict[int, Member] = {}
        self.handlers: dict[str, Handler] = {}
        self.info: Frame = {
            "protocol": PROTOCOL.version,
            "session": os.urandom(8).hex(),
            "began": time.time(),
            "listed": listed,
            "addresses": [],
            "step": 0,
            "stage": 0,
            "rate": 0.0,
            "facts": {},
            "doors": 0,
            "door_of": None,
            **info,
        }
        self.members = Members(self.info, self.guard)
        self.background = Background(tell)
        self.tell = tell
        self._first = first
        self._handshake = Handshake(ticket, identity.peer, self.info, self.record)
        self._proven: OrderedDict[str, Member] = OrderedDict()
        self._quiet = contextlib.ExitStack()
        self._asking: dict[tuple[str, str], asyncio.Task[bool]] = {}
        self._starting: asyncio.Task[Any] | None = None
        self._daemon: asyncio.Task[None] | None = None
        self._host = Host(local, identity, f"farflung/1/{ticket.run}")
        self._gossip = Gossip(self)

    def start(self, deadline_s: float) -> None:
        """Takes its place. Raises UserError."""
        if "HIVEMIND_LOGLEVEL" not in os.environ:
            self._quiet.enter_context(quiet("hivemind"))  # what concerns a user, farflung says
        self.background.start()
        try:
            self.background.run(self._start(deadline_s), 2 * deadline_s + 60)
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
        known = self.members.in_good_standing()[:IN_TICKETS]
        others = (address for member in known for address in member.addresses)
        return tuple(dict.fromkeys((*self.info["addresses"], *others)))

    async def found(self, rank: int, seconds: float) -> Member | None:
        """Who has a rank; one that others have heard of first is waited for, and so many seconds at most."""
        for _ in range(int(min(UNKNOWN_SECONDS, seconds) * 10)):
            if member := self.members.by_rank.get(rank) or self.doors.get(rank):
                return member
            await asyncio.sleep(0.1)
        return None

    def record(self) -> Frame:
        """What this peer says of itself now."""
        return signed(self.identity, self.info)

    def check(self) -> None:
        """Raises UserError when this peer cannot stay in the run."""
        if self.fault:
            raise self.fault

    def meet_oneself(self, news: Member) -> None:
        """Leaves to another process what has the same key, if that began earlier."""
        own = self.info["session"], self.info["began"]
        long_ago = news.signed_at < self.info["began"] + 2 * CLOCK_SECONDS  # it may be from before this one's start
        if news.session == own[0] or long_ago or (news.began, news.session) > (own[1], own[0]):
            return
        self.fault = UserError(
            f"another process takes part with the same key, at {', '.join(news.addresses) or 'no address'} "
            f"({news.host}); a copied run folder needs a key of its own: remove peer.key, or use another --out"
        )

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
            try:
                yield PeerStream(member, *streams)
            except RequestRefusedError as refusal:
                if str(refusal) == UNPROVEN:  # it has forgotten
                    self._proven.pop(member.peer, None)
                raise

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

    async def still_there(self, member: Member) -> bool:
        """Asks a member whether it is there, and has not begun anew; one that is busy may be late with its answer.

        Who waits for many packets of a member asks for each of them: all share one question.
        """
        who = member.peer, member.session
        if who not in self._asking:
            self._asking[who] = asyncio.ensure_future(self._answers(member))
            self._asking[who].add_done_callback(lambda _: self._asking.pop(who))
        return await asyncio.shield(self._asking[who])

    async def _answers(self, member: Member) -> bool:
        try:
            return (await self.handshake(member.peer)).session == member.session
        except TimeoutError:
            known = self.members.by_rank.get(member.rank)
            return known is None or time.monotonic() - known.heard < SILENT_SECONDS
        except (*UNREACHABLE, UserError, FrameError, RequestRefusedError):
            self.members.failed(member.rank)
            return False

    async def look_around(self) -> bool:
        """Finds out where others can reach this peer now; whether that has changed. Raises one of UNREACHABLE."""
        async with asyncio.timeout(PROMPT_SECONDS):
            before, self.info["addresses"] = self.info["addresses"], await self._host.addresses()
        return bool(self.info["addresses"] != before)

    async def announce(self, **info: Any) -> None:
        """Says of itself what some others should hear before the next beat, and hears of them."""
        self.info.update(info)
        members = self.members.in_good_standing()
        told = random.sample(members, min(ANNOUNCED, len(members)))
        await asyncio.gather(*(self.handshake(member.peer) for member in told), return_exceptions=True)

    async def _start(self, deadline_s: float) -> None:
        self._starting = asyncio.current_task()
        await self._host.start(self._on_stream, deadline_s)
        await self._settle()
        if self._first:
            await find_members_if_any(self, self.ticket.addresses)
        elif self.ticket.addresses or self.info["door_of"] is None:  # an island offline has none for its doors
            await find_members(self, self.ticket.addresses, deadline_s)
        if self.members.proven():
            with contextlib.suppress(*UNREACHABLE):  # the daemon has just died, and comes back without relays
                await self._take_relays()
        if self.info["door_of"] is None:  # a door is told of those that it meets
            await self._gossip.arrive()
            self.background.keep("finding others", self._gossip.go_on)

    async def _take_relays(self) -> None:
        """Starts the daemon again with those that were found as its relays: nobody has a stream to it yet."""
        found = self.members.proven()
        if await self._host.takes_relays([member.peer for member in found]):
            self.seen = next((member.sees for member in found if self._host.appears(member.sees)), "")
            await _ended(self._daemon)
            await self._host.stop()
            await self._host.start(self._on_stream, PROMPT_SECONDS)
            await self._settle()

    async def _settle(self) -> None:
        """Watches the daemon that has just started, and takes its addresses."""
        self._daemon = self.background.spawn(self._keep_the_daemon())
        with contextlib.suppress(*UNREACHABLE):  # it has died already; who beats asks again
            await self.look_around()

    async def _keep_the_daemon(self) -> None:
        """Starts the daemon again whenever it dies, unless it does so again and again."""
        deaths: deque[float] = deque(maxlen=DAEMONS)
        failed: UserError | None = None
        while True:
            await self._host.dies()
            deaths.append(time.monotonic())
            if len(deaths) == DAEMONS and deaths[-1] - deaths[0] < DAEMON_SECONDS:
                self.fault = failed or UserError(
                    f"the libp2p daemon (p2pd) has died {DAEMONS} times; see that there is enough memory, and begin "
                    "again from the checkpoint: farflung join RUN/run.ticket --out RUN"
                )
                return
            if failed:
                self.tell(f"{failed}; it is tried again in {AGAIN_SECONDS:.0f} s")
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                self.tell("the libp2p daemon (p2pd) has died; it is started again")
            failed = await self._start_again()

    async def _start_again(self) -> UserError | None:
        """Starts the daemon in the place of the one before; why it cannot."""
        await self._host.stop()
        try:
            await self._host.start(self._on_stream, PROMPT_SECONDS)
        except UserError as error:
            return error
        return None

    def _open(self, peer: str, addresses: Sequence[str] = ()) -> AbstractAsyncContextManager[Streams]:
        member = self.members.of_peer(peer) or self.doors.get(rank_of(peer))
        known = member.addresses if member else addresses or self.ticket.addresses
        return self._host.stream(peer, known, PROMPT_SECONDS)

    def _admit(self, member: Member) -> Member:
        self._proven[member.peer] = member
        self._proven.move_to_end(member.peer)
        while len(self._proven) > PROVEN:
            self._proven.popitem(last=False)
        if member.peer != self.identity.peer and member.listed and member.door_of is None:
            self.members.hear(member, first_hand=True)
        return member

    async def _on_stream(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(info.peer_id)
        member, liable = self._proven.get(peer), self.liable(peer)
        proven = member is not None
        if self.guard.bans(liable) or not self.guard.admit(peer, proven):
            writer.close()
            return
        try:
            await self._heard(info, member, (reader, writer), liable)
            await _discard(reader, LARGEST_FRAME << 10 if proven else LARGEST_HELLO)
        finally:
            self.guard.release(peer, proven)
            writer.close()

    async def _heard(self, info: Any, member: Member | None, streams: Streams, liable: str) -> None:
        """Answers a request, or refuses it and counts the offence."""
        try:
            await self._answer(info, member, streams)
        except RequestRefusedError as refusal:
            await _refuse(streams[1], refusal)
        except TimeoutError:
            self.guard.refuse("too slow")
        except UNREACHABLE:
            pass  # who has gone meanwhile is missed by those who wait for it
        except FrameError as error:
            if member is None:
                self.guard.refuse("stranger")
            else:
                self.guard.strike(liable, "bad request", str(error))
            await _refuse(streams[1], error)
        except Exception as error:  # who asks is not to blame for what is wrong here
            self.background.tell_once(f"an answer to another peer has failed: {error!r}")
            await _refuse(streams[1], RequestRefusedError("this peer cannot answer"))

    def liable(self, peer: str) -> str:
        """Who answers for what a peer does: for a door the island that has named it, whatever it says itself."""
        door = self.doors.get(rank_of(peer))
        if door is None or door.peer != peer or door.door_of is None:
            return peer
        island = self.members.by_rank.get(door.door_of)
        return island.peer if island else peer

    async def _answer(self, info: Any, member: Member | None, streams: Streams) -> None:
        async with asyncio.timeout(PROMPT_SECONDS):
            frame = await read_frame(streams[0], LARGEST_FRAME if member else LARGEST_HELLO)
            if frame.get("kind") == HELLO:
                self._admit(await self._handshake.answer(frame, str(info.peer_id), streams))
                await write_frame(streams[1], {**self.record(), "seen": text_of(info.addr)})
                return
        if member is None:
            raise StrangerError(UNPROVEN)
        handler = self.handlers.get(entry(frame, "kind", str))
        if handler is None:
            raise FrameError(f"there is no request {frame['kind']!r:.40}")
        await handler(PeerStream(member, *streams), frame)

    async def _stop(self) -> None:
        await _ended(self._starting, self._daemon)
        await self._host.stop()


async def _ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels work that has begun, and waits until it has ended: a daemon that just starts would be left behind."""
    if begun := [task for task in tasks if task]:
        for task in begun:
            task.cancel()
        await asyncio.wait(begun)


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
