"""What peers of a swarm ask each other about steps that all of them take together, over the run's streams."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

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
from farflung.swarm.leading import most_believed
from farflung.swarm.letters import LostError, Microbatch, ledger_of
from farflung.swarm.signs import heard, works
from farflung.swarm.synchronous import Counts, Report, Synchronous, Term
from farflung.swarm.visits import MOST
from farflung.swarm.waits import Waits
from farflung.swarm.work import Learnt, Usual

QUESTION = "step"
LONGEST_SECONDS = 600.0
"""Until an answer begins, whatever holds it up."""
MOST_STEPS = 4
"""Steps of which a peer tells microbatches at a time, at most: one, and those before of which some were late."""
LARGEST_STATE = 64
"""Bytes a parameter that a stage's state has at most: weights, and what an optimizer keeps of them."""


@dataclass
class Questions:
    """One peer's part: it answers others, and asks them as a `Participant` each. All run in the thread of the peers.

    Args:
        own: what it does at a step.
        state: its weights and their optimizer's state as bytes, and the version of them.
        samples: of a microbatch.
        parts: microbatches of a step.
        last: the run's last step.
        stall_s: seconds without a byte, or a sign of life, after which an answer is given up.
    """

    peers: Peers
    own: Synchronous
    state: Callable[[], tuple[int, bytes]]
    samples: int
    parts: int
    last: int
    stall_s: float = 20.0
    learnt: Waits = field(default_factory=lambda: Waits(math.inf))
    """How long what others have learnt takes."""
    states: Waits = field(default_factory=lambda: Waits(math.inf))
    sizes: Usual = field(default_factory=Usual)
    """Of what mates have learnt, a sample."""
    _turns: WeakValueDictionary[int, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def open(self) -> None:
        """Begins to answer."""
        self.peers.handlers[QUESTION] = self._on_question

    def of(self, member: Member) -> Asked:
        """Another peer."""
        return Asked(self, member)

    async def _on_question(self, stream: PeerStream, frame: Frame) -> None:
        asked = entry(frame, "ask", str)
        answer = _ORDERS.get(asked) or _ANSWERS.get(asked)
        if answer is None:
            raise FrameError("a question that nobody knows")
        if asked in _ORDERS:
            self._check_order(stream.member.rank, _term(frame))
        async with contextlib.AsyncExitStack() as stack:
            try:
                with works(stream):
                    if asked in _ANSWERS:
                        await stack.enter_async_context(self._turn(stream.member.rank))
                    told, payload = await answer(self, frame)
            except LostError as lost:
                raise RequestRefusedError(str(lost)) from lost
            content = memoryview(payload)
            await stream.tell({**told, "size": len(content)})
            await write_payload(stream.writer, content, self.stall_s)
            await stream.hear_the_end(self.stall_s)

    def _turn(self, rank: int) -> asyncio.Lock:
        """Held while one that asks is answered: it need not read, and what it is told lies in memory until then."""
        return self._turns.setdefault(rank, asyncio.Lock())

    def _check_order(self, rank: int, term: Term) -> None:
        """Only heads lead, each in its own name; one whose stage is not heard of yet may be one.

        Raises FrameError, and RequestRefusedError for who serves another stage, but may have moved.
        """
        if term[1] != rank:
            raise FrameError("an order in another one's name")
        member = self.peers.members.by_rank.get(rank)
        if member is None or 0 < member.stage < self.own.peer.stages:
            raise RequestRefusedError("only a head leads")

    async def _report(self, frame: Frame) -> tuple[Frame, bytes]:
        one = await self.own.report(_term(frame))
        told = {"term": one.term, "stage": one.stage, "version": one.version, "under_way": one.under_way}
        return {**told, "learnt": told_names(one.learnt)}, b""

    async def _run(self, frame: Frame) -> tuple[Frame, bytes]:
        names, counts_in = _few_names(frame, self.parts), None
        if frame.get("counts_in") is not None:
            counts_in = frozenset(whole(one, MOST) for one in entry(frame, "counts_in", list))
        losses = await self.own.run(_term(frame), names, counts_in)
        told = np.array([losses[one] for one in sorted(losses, key=_order)], np.float64)
        return {"learnt": told_names(losses)}, told.tobytes()

    async def _learnt(self, frame: Frame) -> tuple[Frame, bytes]:
        learnt = await self.own.learnt_now()
        told = {"learnt": told_names(learnt.samples), "losses": learnt.losses}
        return told, _flat(learnt.sums.values()).numpy().tobytes()

    async def _gather(self, frame: Frame) -> tuple[Frame, bytes]:
        with reading("mates"):
            mates = {whole(int(mate), MOST): str(digest) for mate, digest in entry(frame, "mates", dict).items()}
        if not mates:
            raise FrameError("an order to gather what nobody has learnt")
        return {"missing": await self.own.gather(_term(frame), mates)}, b""

    async def _step(self, frame: Frame) -> tuple[Frame, bytes]:
        gathered = self.own.gathered
        names = {Microbatch(self.own.work.version, number) for number in range(self.parts)}
        if gathered is not None and not gathered >= names:
            raise FrameError("an order to take a step without some of its microbatches")
        await self.own.step(_term(frame))
        return {}, b""

    async def _settle(self, frame: Frame) -> tuple[Frame, bytes]:
        await self.own.settle(_term(frame))
        return {}, b""

    async def _catch_up(self, frame: Frame) -> tuple[Frame, bytes]:
        givers = [whole(one, MOST) for one in entry(frame, "givers", list)]
        term, version = _term(frame), whole(frame.get("version"), self.last)
        if version > self.own.work.version:
            await self._check_reached(version, leader=term[1])
        await self.own.catch_up(term, version, givers)
        return {}, b""

    async def _check_reached(self, version: int, leader: int) -> None:
        """Believes a leader as leaders do others. Who has not stepped yet may have reached anything.

        Else one of many could end a run that has hardly begun. Raises RequestRefusedError.
        """
        standing = self.peers.members.in_good_standing()
        others = [one for one in standing if "serves" in one.facts and one.rank != leader]
        answers = await asyncio.gather(*(self.peers.handshake(one.peer) for one in others), return_exceptions=True)
        told = [one.step if one.rate else math.inf for one in answers if isinstance(one, Member)]
        if version > most_believed([version, self.own.work.version, *told]) + 1:
            raise RequestRefusedError("hardly anybody has reached the step that it is to catch up with")

    async def _state(self, frame: Frame) -> tuple[Frame, bytes]:
        version, content = await asyncio.to_thread(self.state)
        return {"version": version}, content


Answer = Callable[[Questions, Frame], Awaitable[tuple[Frame, bytes]]]
_ORDERS: dict[str, Answer] = {
    "report": Questions._report,
    "run": Questions._run,
    "gather": Questions._gather,
    "step": Questions._step,
    "settle": Questions._settle,
    "catch up": Questions._catch_up,
}
"""What a leader asks, in its own name."""
_ANSWERS: dict[str, Answer] = {"learnt": Questions._learnt, "state": Questions._state}
"""What anyone may ask."""


@dataclass
class Asked:
    """Another peer; see Participant."""

    here: Questions
    member: Member

    async def report(self, term: Term) -> Report:
        """See Participant."""
        told, _ = await self._ask("report", term=term)
        with self.striking():
            report = _read_report(told, self.here)
            if report.stage != self.member.stage:
                raise FrameError(f"a report of stage {report.stage} by one that serves {self.member.stage}")
            return report

    async def run(self, term: Term, microbatches: list[Microbatch], counts_in: Counts) -> dict[Microbatch, float]:
        """See Participant."""
        counts = None if counts_in is None else sorted(counts_in)
        names = told_names(microbatches)
        told, content = await self._ask("run", 8 * len(microbatches), term=term, learnt=names, counts_in=counts)
        with self.striking():
            losses = _read_losses(told, content, self.here.parts)
        return {one: losses[one] for one in microbatches if one in losses}

    async def learnt_now(self) -> Learnt:
        """See Participant."""
        own = self.here.own.work.learnt
        numel = sum(one.numel() for one in own.sums.values())
        told, content = await self._held("learnt", self.here.learnt, 4 * numel, self.here.stall_s)
        with self.striking():
            return _read_learnt(told, content, own, self.here)

    async def gather(self, term: Term, mates: Mapping[int, str]) -> list[int]:
        """See Participant."""
        told, _ = await self._ask("gather", term=term, mates=dict(mates))
        with self.striking(), reading("who is missing"):
            return [whole(one, MOST) for one in entry(told, "missing", list)]

    async def step(self, term: Term) -> None:
        """See Participant."""
        await self._ask("step", term=term)

    async def settle(self, term: Term) -> None:
        """See Participant."""
        await self._ask("settle", term=term)

    async def catch_up(self, term: Term, version: int, givers: list[int]) -> None:
        """See Participant."""
        await self._ask("catch up", term=term, version=version, givers=givers)

    async def state(self) -> tuple[int, bytes]:
        """Its weights and their optimizer's state, and the version of them. Raises LostError."""
        numel = sum(one.numel() for one in self.here.own.work.learnt.sums.values())
        told, content = await self._held("state", self.here.states, LARGEST_STATE * numel + (1 << 20), LONGEST_SECONDS)
        with self.striking():
            return whole(told.get("version"), self.here.last), content

    @contextlib.contextmanager
    def striking(self) -> Iterator[None]:
        """What cannot be an answer counts against the peer. Raises LostError."""
        try:
            yield
        except FrameError as false:
            peers = self.here.peers
            peers.guard.strike(peers.liable(self.member.peer), "false answer", str(false))
            raise LostError(str(false)) from false

    async def _held(self, what: str, waits: Waits, most: int, prompt_s: float) -> tuple[Frame, bytes]:
        """Something that the other has, which others hold up in no way. Raises LostError."""
        rank, began = self.member.rank, time.monotonic()
        try:
            async with asyncio.timeout(waits.seconds(rank)):
                found = await self._ask(what, most, prompt_s)
        except (LostError, TimeoutError) as lost:
            waits.failed(rank, time.monotonic() - began, time.monotonic())
            raise LostError(str(lost) or "late") from lost
        waits.took(rank, time.monotonic() - began)
        return found

    async def _ask(
        self, what: str, most: int = 0, answer_s: float = LONGEST_SECONDS, **told: Any
    ) -> tuple[Frame, bytes]:
        """The answer, and at most so many bytes behind it. Raises LostError."""
        peers = self.here.peers
        try:
            with self.striking():
                async with peers.stream(self.member) as stream:
                    await stream.tell({"kind": QUESTION, "ask": what, **told})
                    async with asyncio.timeout(answer_s):
                        answer = await heard(stream, self.here.stall_s)
                    content = bytearray(whole(answer.get("size"), most))
                    await read_payload(stream.reader, memoryview(content), self.here.stall_s, SLOWEST)
                    return answer, bytes(content)
        except RequestRefusedError as refused:
            raise LostError(str(refused)) from refused
        except TimeoutError as late:
            raise LostError("late") from late
        except UNREACHABLE as gone:
            await peers.still_there(self.member)  # else it counts as there for a while
            raise LostError(str(gone) or "gone") from gone


@reading("a term")
def _term(frame: Frame) -> Term:
    count, leader = entry(frame, "term", list)
    return whole(count, MOST), whole(leader, MOST)


def told_names(names: Iterable[Microbatch]) -> list[list[Any]]:
    """Microbatches by their stream and step: of each of its numbers one bit, in hexadecimal digits."""
    return [[stream, step, f"{_bits(numbers):x}"] for stream, step, *numbers in ledger_of(names)]


def _bits(numbers: list[int]) -> int:
    digits = bytearray(b"0" * (numbers[-1] + 1))
    for one in numbers:
        digits[-1 - one] = ord("1")
    return int(digits, 2)


@reading("a ledger")
def read_names(frame: Frame, parts: int) -> list[Microbatch]:
    """The microbatches that `told_names` was given, in the order of a ledger, none of a number from `parts` on."""
    found = []
    for stream, step, bits in entry(frame, "learnt", list):
        numbers = int(bits, 16)
        if not 0 <= numbers < 1 << parts:
            raise FrameError(f"microbatches of which a step has not so many; it has {parts}")
        where = whole(step, MOST), whole(stream, MOST)
        found += [Microbatch(where[0], one, where[1]) for one, bit in enumerate(f"{numbers:b}"[::-1]) if bit == "1"]
    return found


def _few_names(frame: Frame, parts: int) -> list[Microbatch]:
    """See `read_names`. Raises FrameError for those of many steps, all of which would be run, or remembered."""
    if len(entry(frame, "learnt", list)) > MOST_STEPS:
        raise FrameError(f"microbatches of more than {MOST_STEPS} steps")
    return read_names(frame, parts)


def _order(one: Microbatch) -> tuple[int, int, int]:
    """That of a ledger."""
    return one.stream, one.step, one.number


@reading("a report")
def _read_report(frame: Frame, here: Questions) -> Report:
    bounds = {"stage": here.own.peer.stages - 1, "version": here.last, "under_way": MOST}
    stage, version, under_way = (whole(frame.get(name), most) for name, most in bounds.items())
    return Report(_term(frame), stage, version, frozenset(_few_names(frame, here.parts)), under_way)


@reading("losses")
def _read_losses(frame: Frame, content: bytes, parts: int) -> dict[Microbatch, float]:
    losses = [number(one, -MOST) for one in np.frombuffer(content, np.float64).tolist()]
    return dict(zip(_few_names(frame, parts), losses, strict=True))


@reading("what a peer has learnt")
def _read_learnt(frame: Frame, content: bytes, own: Learnt, here: Questions) -> Learnt:
    flat = torch.frombuffer(bytearray(content), dtype=torch.float32)
    if not flat.isfinite().all():
        raise FrameError("gradients that are not finite")
    names = _few_names(frame, here.parts)
    size = float(flat.double().norm()) / max(1, here.samples * len(names))
    usual = float(_flat(own.sums.values()).double().norm()) / max(1, sum(own.samples.values()))
    if (size and not names) or not here.sizes.takes(size, usual):
        raise FrameError("gradients that are far too large")
    parts = flat.split([one.numel() for one in own.sums.values()])
    sums = {
        name: part.view(one.shape).to(one.device) for (name, one), part in zip(own.sums.items(), parts, strict=True)
    }
    return Learnt(sums, dict.fromkeys(names, here.samples), number(frame.get("losses"), -MOST))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([one.detach().float().flatten().cpu() for one in tensors])
