"""How peers hear of each other: each tells one other of itself and of some that it knows, again and again.

A thousand peers cost each of them no more than eight do. Who is lost is called for ever, ever more rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from farflung.errors import UserError, counted
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.peers.addresses import peers_at
from farflung.networks.peers.frames import (
    SLOWEST,
    Frame,
    FrameError,
    entry,
    number,
    read_payload,
    reading,
    told_in,
    whole,
    write_payload,
)
from farflung.networks.peers.member import BEAT_SECONDS, CLOCK_SECONDS, Member, member_in

if TYPE_CHECKING:
    from farflung.networks.internet.contact.peers import Peers

TOLD, TOLD_A_NEWCOMER = 7, 48
"""Others that a peer tells of in a beat, and when it is asked for many."""
LARGEST_NEWS = 1 << 18
"""Bytes of the records in one message, unpacked."""
JITTER = 0.2
"""The part by which pauses between beats differ, so that peers do not beat together."""
AT_A_TIME, OF_A_TELLER = 8, 4
"""Members that are greeted at a time, and those among them of which one other has told."""
ENOUGH, ARRIVE_SECONDS = 24, 4.0
"""A newcomer that knows so many, or has looked for so long, begins."""
OFTEN, OFTEN_SECONDS = 6, 4.0
"""A member that comes so often in so short a time is not answered."""
LONGEST_PAUSE = 600.0
"""Seconds between two calls of one that is lost, at most."""


class Gossip:
    """This peer's part in it; its methods run in the peers' thread."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._came: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=OFTEN))
        self._greetings: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Who is greeted, and who has told of it."""
        self._swaps: dict[str, float] = {}
        """With whom it last began to swap news, and when."""
        self._turns_of_the_lost = asyncio.Semaphore(AT_A_TIME)
        self._calls: dict[str, tuple[float, float]] = {}
        """When each that is lost is called again, and the pause after that."""
        self._alone: bool | None = None
        self._clock_gap = time.time() - _up_seconds()
        peers.handlers["news"] = self._on_news

    async def arrive(self) -> None:
        """Hears of many, and greets them until it knows enough."""
        members = self._peers.members
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVE_SECONDS):
                asked = members.in_good_standing()[:3]
                swaps = {self._peers.background.spawn(self._swap(member, many=True)) for member in asked}
                while (swaps or self._greetings) and len(members.proven()) < ENOUGH:
                    greetings = {task for _, task in self._greetings.values()}
                    await asyncio.wait(swaps | greetings, return_when=asyncio.FIRST_COMPLETED)
                    swaps = {swap for swap in swaps if not swap.done()}
                    self._greet()

    async def go_on(self) -> None:
        """Beats for ever."""
        while True:
            await asyncio.sleep(BEAT_SECONDS * random.uniform(1 - JITTER, 1 + JITTER))
            self._watch_the_clock()
            self._seek_the_lost()
            self._tell_if_alone()
            with contextlib.suppress(*UNREACHABLE):  # the daemon may be about to be started again
                if await self._peers.look_around():
                    self._peers.background.spawn(self._peers.announce())
            await self.beat()

    async def beat(self) -> None:
        """Begins to greet some that were only heard of, and to swap news with the one that is silent for longest."""
        self._greet()
        known = self._peers.members.in_good_standing()
        self._swaps = {one.peer: began for one in known if (began := self._swaps.get(one.peer))}
        if known:
            # One that refuses to tell would else be asked at each beat, and nobody else.
            silent = min(known, key=lambda member: max(member.heard, self._swaps.get(member.peer, 0.0)))
            self._swaps[silent.peer] = time.monotonic()
            self._peers.background.spawn(self._swap(silent))

    def hear(self, told: Iterable[Frame], teller: str) -> None:
        """Takes records that a peer has told; those that are forged are dropped and counted."""
        for record in told:
            try:
                self._hear(record, teller)
            except FrameError:
                self._peers.guard.refuse("forged record")

    @reading("a record")
    def _hear(self, record: Frame, teller: str) -> None:
        about, members = entry(record, "about", dict), self._peers.members
        known = members.of_peer(entry(about, "peer", str))
        if known and number(about.get("time")) <= known.signed_at:
            return
        news = member_in(record, number(record.get("age", 0.0)))
        if news.peer == self._peers.identity.peer:
            self._peers.meet_oneself(news)
            return
        if news.listed and news.door_of is None:
            news.teller = teller
            members.hear(news)

    def _greet(self) -> None:
        """Begins to have some that were only heard of prove that they are there.

        Those that one other has told of it may have made up, and nobody answers there: others' come first.
        """
        waiting: defaultdict[str, list[Member]] = defaultdict(list)
        for member in self._peers.members.unproven():
            if member.peer not in self._greetings:
                waiting[member.teller].append(member)
        under_way = Counter(teller for teller, _ in self._greetings.values())
        while waiting and len(self._greetings) < AT_A_TIME:
            teller = min(waiting, key=lambda teller: (under_way[teller], random.random()))
            if under_way[teller] >= OF_A_TELLER:
                break
            member = waiting[teller].pop(random.randrange(len(waiting[teller])))
            self._greetings[member.peer] = teller, self._peers.background.spawn(self._prove(member))
            under_way[teller] += 1
            if not waiting[teller]:
                del waiting[teller]

    async def _prove(self, member: Member) -> None:
        try:
            await self._peers.handshake(member.peer)
        except (*UNREACHABLE, RequestRefusedError, FrameError, UserError):
            self._peers.members.failed(member.rank)
        finally:
            del self._greetings[member.peer]

    async def _swap(self, member: Member, many: bool = False) -> None:
        """Tells a member of others, and hears of others from it."""
        try:
            async with asyncio.timeout(PROMPT_SECONDS), self._peers.stream(member) as stream:
                await self._tell(stream, {"kind": "news", "many": many}, TOLD)
                answer = await stream.hear()
                self.hear(await self._told(stream, answer), member.peer)
        except FrameError as error:
            self._peers.guard.strike(member.peer, "bad news", str(error))
        except RequestRefusedError:
            pass  # it is there
        except UNREACHABLE:
            self._peers.members.failed(member.rank)

    async def _on_news(self, stream: PeerStream, frame: Frame) -> None:
        came, now = self._came[stream.member.peer], time.monotonic()
        if len(came) == OFTEN and now - came[0] < OFTEN_SECONDS:
            self._peers.guard.refuse("too much news")
            raise RequestRefusedError("it was told a moment ago")
        came.append(now)
        self._forget_who_came()
        before = self._peers.members.of_peer(stream.member.peer)
        self.hear(await self._told(stream, frame), stream.member.peer)
        after = self._peers.members.of_peer(stream.member.peer)
        # Another process may have its key: each then hears of the other.
        twin = [before] if before and after and before.session != after.session else []
        await self._tell(stream, {}, TOLD_A_NEWCOMER if frame.get("many") else TOLD, twin)

    def _forget_who_came(self) -> None:
        for peer in [peer for peer, came in self._came.items() if time.monotonic() - came[-1] > OFTEN_SECONDS]:
            del self._came[peer]

    async def _tell(self, stream: PeerStream, head: Frame, count: int, also: Sequence[Member] = ()) -> None:
        """Sends this peer's record and those of some others."""
        to, now = stream.member.peer, time.monotonic()
        known = self._peers.members.in_good_standing()
        others = [member for member in known if member.record and member.peer != to]
        chosen = [*also, *random.sample(others, min(count, len(others)))]
        told = [{**one.record, "age": now - one.heard} for one in chosen]
        content = zlib.compress(json.dumps([self._peers.record(), *told], separators=(",", ":")).encode())
        await stream.tell({**head, "size": len(content)})
        await write_payload(stream.writer, memoryview(content), PROMPT_SECONDS)

    async def _told(self, stream: PeerStream, head: Frame) -> list[Frame]:
        content = bytearray(whole(head.get("size"), LARGEST_NEWS))
        await read_payload(stream.reader, memoryview(content), PROMPT_SECONDS, SLOWEST)
        return news_in(bytes(content))

    def _seek_the_lost(self) -> None:
        """Calls those that have gone, at their old addresses, and who the ticket leads to if nobody else is there."""
        lost = {member.peer for member in self._peers.members.missing()}
        if not self._peers.members.proven():
            lost |= set(peers_at(self._peers.ticket.addresses)) - {self._peers.identity.peer}
        now = time.monotonic()
        self._calls = {peer: call for peer, call in self._calls.items() if peer in lost}
        for peer in lost:
            due, pause = self._calls.get(peer, (now, 2 * BEAT_SECONDS))
            if now >= due:
                self._calls[peer] = now + pause, min(2 * pause, LONGEST_PAUSE)
                self._peers.background.spawn(self._call(peer))

    async def _call(self, peer: str) -> None:
        with contextlib.suppress(*UNREACHABLE, RequestRefusedError, FrameError, UserError):
            async with self._turns_of_the_lost:
                await self._peers.handshake(peer)

    def _tell_if_alone(self) -> None:
        alone, before = not self._peers.members.proven(), self._alone
        if alone and before is False:
            places = counted(len(self._calls), "peer")
            self._peers.tell(f"no other peer of the run answers; this one goes on, and calls {places} ever more rarely")
        if before and not alone:
            self._peers.tell("others of the run are there again")
        self._alone = alone if before is not None or not alone else None

    def _watch_the_clock(self) -> None:
        gap = time.time() - _up_seconds()
        if abs(gap - self._clock_gap) > CLOCK_SECONDS:
            moved = gap - self._clock_gap
            self._peers.tell(
                f"this machine's clock has jumped by {moved:+.0f} s; set it right, or peers lose sight of it"
            )
            self._clock_gap = gap


def _up_seconds() -> float:
    """How long this machine is up; with the time for which it was suspended, where that is known."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


@reading("news")
def news_in(content: bytes) -> list[Frame]:
    """The records that a message holds. Raises FrameError."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(content, LARGEST_NEWS)
    if not unpacking.eof:
        raise FrameError("news are longer than any may be")
    told = told_in(text)
    if not isinstance(told, list) or len(told) > TOLD_A_NEWCOMER + 2:
        raise FrameError("news are no list of records, or of too many")
    return told
