"""Microbatches that visit other peers over the streams of a run on the internet; nobody else is on their way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from farflung.networks.base import Traffic
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.peers.frames import (
    SLOWEST,
    Frame,
    FrameError,
    entry,
    number,
    read_payload,
    reading,
    whole,
    write_payload,
)
from farflung.networks.peers.member import Member
from farflung.swarm.letters import Call, Caller, FalseLetterError, Forward, Gradient, LostError, Microbatch
from farflung.swarm.signs import heard, works

VISIT = "visit"
MOST = 1 << 53
"""The largest step, number or stream of a microbatch."""
LOST = (*UNREACHABLE, RequestRefusedError, FrameError, TimeoutError)

Serve = Callable[[Forward, Caller], Coroutine[Any, Any, None]]


@dataclass
class Visits:
    """One peer's `Post`, and its door for others' visits. All methods run in the thread of the peers.

    A visit is one stream: the microbatch's name and packet go there, the gradient comes back on it, then the word
    whether that is kept. So a peer that dies ends its visits with it, at both ends.

    Args:
        stage: that this peer serves.
        entering, leaving: a packet's form on the boundaries before and after it; None at the model's ends.
        serve: takes a microbatch that comes through the stage.
        stall_s: seconds without a byte, or a sign of life, after which a visit is given up.
        word_s: seconds that a peer waits at most, for each stage before it, for the word whether its gradient is kept.
        scores: the form of what comes back of a text.
    """

    peers: Peers
    stage: int
    stages: int
    entering: Tensor | None
    leaving: Tensor | None
    serve: Serve
    stall_s: float = 20.0
    word_s: float = 600.0
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    traffic: Traffic = field(default_factory=Traffic)

    def open(self) -> None:
        """Lets others' microbatches in."""
        self.peers.handlers[VISIT] = self._on_visit

    def call(self, peer: int, forward: Forward) -> Call:
        """See Post."""
        return _Call(self, peer, forward)

    async def _on_visit(self, stream: PeerStream, frame: Frame) -> None:
        forward = await self._entered(stream, frame)
        with works(stream) as signs:
            visit = _Visitor(self, stream, signs)
            await self._visited(visit, asyncio.ensure_future(self.serve(forward, visit)))

    async def _visited(self, visit: _Visitor, serving: asyncio.Future[None]) -> None:
        ends: list[asyncio.Future[Any]] = [serving, visit.word]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not visit.given:
                serving.cancel()  # nobody wants it any more
            await asyncio.wait([serving])
            if not serving.cancelled():
                serving.result()
        except FalseLetterError as false:
            raise FrameError(str(false)) from false  # counts against who has sent it
        except LostError as lost:
            raise RequestRefusedError(str(lost)) from lost
        finally:
            serving.cancel()
            visit.word.cancel()
            await asyncio.wait(ends)  # one reader after the other: what follows reads to the end

    async def _entered(self, stream: PeerStream, frame: Frame) -> Forward:
        """The microbatch that comes. Raises FrameError."""
        name = read_visit(frame, self.stages, len(self.scores))
        if name.stage != self.stage or self.entering is None:
            raise RequestRefusedError(f"stage {name.stage} is not served here")
        packet = await self.read(stream, frame, self.entering)
        return replace(name, packet=packet)

    def answer(self, forward: Forward) -> Tensor | None:
        """The form of what comes back of a microbatch that was handed on, besides its loss."""
        if forward.judged:
            return None if forward.text is None else self.scores
        return self.leaving

    async def write(self, stream: PeerStream, packet: Tensor) -> None:
        """Sends a packet."""
        content = packet.contiguous().view(torch.uint8).reshape(-1).numpy().data
        await write_payload(stream.writer, content, self.stall_s)
        self.traffic.sent(packet.nbytes)

    async def read(self, stream: PeerStream, told: Frame, room: Tensor) -> Tensor:
        """A packet of the form of `room`, which is not changed. Raises FrameError where another one is told of."""
        if told.get("size") != room.nbytes:
            raise FrameError(f"a packet has {told.get('size')!r:.20} bytes; {room.nbytes} were expected")
        packet = torch.empty_like(room)
        await read_payload(stream.reader, packet.view(torch.uint8).reshape(-1).numpy().data, self.stall_s, SLOWEST)
        self.traffic.received(packet.nbytes)
        return packet


@dataclass
class _Visitor:
    """Who has brought a microbatch, as the stage sees it."""

    visits: Visits
    stream: PeerStream
    signs: asyncio.Task[None]
    given: bool = False

    def __post_init__(self) -> None:
        self.word = asyncio.ensure_future(_word(self.stream, self.visits.stall_s))

    async def give(self, gradient: Gradient) -> None:
        self.given = True
        self.signs.cancel()
        try:
            told = {"loss": gradient.loss, "behind": gradient.behind}
            if gradient.packet is None:
                await self.stream.tell(told)
                return
            await self.stream.tell({**told, "size": gradient.packet.nbytes})
            await self.visits.write(self.stream, gradient.packet)
        except LOST as error:
            raise LostError(str(error) or "gone") from error

    async def kept(self) -> bool:
        try:
            async with asyncio.timeout(self.visits.word_s * self.visits.stage):
                return await asyncio.shield(self.word)
        except TimeoutError:
            return False


class _Call:
    """A microbatch that was handed on."""

    def __init__(self, visits: Visits, peer: int, forward: Forward) -> None:
        self._visits = visits
        self._member: Member | None = None
        loop = asyncio.get_running_loop()
        self._gradient: asyncio.Future[Gradient] = loop.create_future()
        self._word: asyncio.Future[bool] = loop.create_future()
        self._visit = asyncio.ensure_future(self._paid(peer, forward))

    async def gradient(self) -> Gradient:
        return await asyncio.shield(self._gradient)

    async def keep(self) -> None:
        if not self._word.done():
            self._word.set_result(True)
        await asyncio.wait([self._visit])

    def drop(self, false: str = "") -> None:
        if false and self._member is not None:
            peers = self._visits.peers
            peers.guard.strike(peers.liable(self._member.peer), "false gradient", false)
        if not self._word.done():
            self._word.set_result(False)
        if not self._gradient.done():
            self._visit.cancel()
            self._gradient.cancel()
        elif not self._gradient.cancelled():
            self._gradient.exception()  # was seen

    async def _paid(self, peer: int, forward: Forward) -> None:
        """Pays the visit. Nothing is raised: who waits for the gradient hears of it."""
        lost: LostError = LostError("gone")
        try:
            await self._go(peer, forward)
        except FrameError as error:
            lost = FalseLetterError(str(error))
        except LOST as error:
            lost = LostError(str(error) or "gone")
        finally:
            if not self._gradient.done():
                self._gradient.set_exception(lost)
                self._gradient.exception()  # who waits for it may have gone

    async def _go(self, peer: int, forward: Forward) -> None:
        visits = self._visits
        self._member = await visits.peers.found(peer, visits.stall_s)
        if self._member is None:
            raise RequestRefusedError("it is not there")
        async with visits.peers.stream(self._member) as stream:
            await stream.tell({**told_visit(forward), "size": forward.packet.nbytes})
            await visits.write(stream, forward.packet)
            with works(stream):
                frame = await heard(stream, visits.stall_s)
                with reading("a gradient"):
                    loss, behind = number(frame.get("loss"), -MOST), number(frame.get("behind"))
                room = visits.answer(forward)
                packet = None if room is None else await visits.read(stream, frame, room)
                if not self._gradient.done():
                    self._gradient.set_result(Gradient(packet, loss, behind))
                kept = await self._word
            await stream.tell({"kept": kept})
            with contextlib.suppress(*LOST):
                await stream.hear(visits.stall_s)  # closing before it has come could cut it off


def refuse_visits(peers: Peers) -> None:
    """Sends microbatches on to others until this peer serves a stage; who does not know yet is not to blame."""

    async def refuse(stream: PeerStream, frame: Frame) -> None:
        raise RequestRefusedError("it serves no stage yet")

    peers.handlers[VISIT] = refuse


def told_visit(forward: Forward) -> Frame:
    """A microbatch's name, as it is announced."""
    one = forward.microbatch
    return {
        "kind": VISIT,
        "stage": forward.stage,
        "microbatch": [one.step, one.number, one.stream],
        "version": forward.version,
        "counts_in": None if forward.counts_in is None else sorted(forward.counts_in),
        **({} if forward.text is None else {"text": list(forward.text)}),
    }


@reading("a visit")
def read_visit(frame: Frame, stages: int, tokens: int) -> Forward:
    """What was announced, without its packet; its text has numbers below `tokens`. Raises FrameError."""
    step, place, stream = (whole(one, MOST) for one in entry(frame, "microbatch", list))
    counts_in = frame.get("counts_in")
    if counts_in is not None:
        counts_in = frozenset(whole(one, stages - 1) for one in entry(frame, "counts_in", list)[:stages])
    stage, version = whole(frame.get("stage"), stages - 1), whole(frame.get("version"), MOST)
    found = Forward(Microbatch(step, place, stream), stage, version, counts_in)
    if "text" not in frame:
        return found
    if not found.judged:
        raise FrameError("a text that is to be learnt from")
    return replace(found, text=tuple(whole(one, tokens - 1) for one in entry(frame, "text", list)))


async def _word(stream: PeerStream, silent_s: float) -> bool:
    """Whether the caller keeps a gradient; it does not where it has gone or is silent, or says anything else."""
    try:
        kept: bool = entry(await heard(stream, silent_s), "kept", bool)
        with contextlib.suppress(*LOST):
            await stream.tell({"heard": kept})
        return kept
    except LOST:
        return False
