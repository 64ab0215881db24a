"""What peers of a swarm answer each other about steps that all take together: whatever is false is refused."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from test_swarm_visits import Make, made  # noqa: F401

from farflung.networks.internet.contact.streams import PeerStream
from farflung.networks.peers.frames import FrameError, encoded
from farflung.pipeline.settings import MOST_TOGETHER
from farflung.swarm.letters import LostError, Microbatch
from farflung.swarm.questions import MOST_STEPS, QUESTION, Asked, Questions, read_names, told_names
from farflung.swarm.signs import SIGN
from farflung.swarm.synchronous import Participant, Synchronous, digest_of
from farflung.swarm.work import Learnt

T = TypeVar("T")
PARTS, LAST = 6, 100
TERM = (0, 0)


@given(st.frozensets(st.builds(Microbatch, st.integers(0, 3), st.integers(0, 40), st.integers(0, 2))))
def test_microbatches_are_read_as_they_were_told(names: frozenset[Microbatch]) -> None:
    frame = json.loads(json.dumps({"learnt": told_names(names)}))
    assert read_names(frame, 41) == sorted(names, key=lambda one: (one.stream, one.step, one.number))


def test_as_many_microbatches_as_a_step_may_have_fit_into_a_frame() -> None:
    names = [Microbatch(10**9, number) for number in range(1, MOST_TOGETHER, 2)]
    frame = {"kind": QUESTION, "ask": "run", "learnt": told_names(names), "term": [1 << 40, 1 << 40]}
    assert read_names(json.loads(encoded(frame)[4:]), MOST_TOGETHER) == names


@given(st.lists(st.lists(st.integers() | st.text(max_size=4) | st.none(), max_size=4), max_size=3))
def test_whatever_comes_in_place_of_a_ledger_is_refused_or_read(entries: list[list[Any]]) -> None:
    try:
        found = read_names({"learnt": entries}, PARTS)
    except FrameError:
        return
    assert all(0 <= one.number < PARTS for one in found)


def report(**changed: Any) -> dict[str, Any]:
    return {"term": [0, 0], "stage": 1, "version": 0, "under_way": 0, "learnt": [], "size": 0, **changed}


def learnt(numel: int, factor: float, **changed: Any) -> tuple[dict[str, Any], bytes]:
    content = np.full(numel, factor, np.float32).tobytes()
    return {"learnt": [[0, 0, "1"]], "losses": 1.0, "size": len(content), **changed}, content


NESTED = b'{"term":' + b"[" * 60_000 + b"]" * 60_000 + b"}"
ENDLESS = struct.pack(">I", 1 << 31)
REPORTS: dict[str, dict[str, Any]] = {
    "a stage that there is not": report(stage=7),
    "another stage than its own": report(stage=0),
    "a step after the last": report(version=LAST + 1),
    "microbatches that a step has not": report(learnt=[[0, 0, "f" * 40]]),
    "microbatches of many steps": report(learnt=[[0, step, "1"] for step in range(MOST_STEPS + 1)]),
    "numbers below zero": report(under_way=-1),
    "no term": report(term="x"),
    "bytes that nobody asked for": report(size=1 << 40),
}


@pytest.mark.slow
def test_a_peer_whose_answers_are_false_is_struck_and_counts_as_lost(made: Make) -> None:  # noqa: F811
    swarm = made([1, 2])
    here, liar = swarm.of(1)
    work = here.work
    for sums in work.learnt.sums.values():
        sums.fill_(1.0)
    work.learnt.samples[Microbatch(0, 1)] = 3
    own = Synchronous(here.stage, work, None, None, None)  # type: ignore[arg-type]
    questions = Questions(here.peers, own, lambda: (0, b""), 3, PARTS, LAST, patience(20))
    member = here.peers.members.by_rank[liar.peers.identity.rank]
    member.stage = 1
    asked = Asked(questions, member)
    numel = sum(one.numel() for one in work.learnt.sums.values())

    def lie(answer: Callable[[PeerStream], Awaitable[None]], question: Callable[[], Awaitable[Any]]) -> None:
        async def on_question(stream: PeerStream, _: Any) -> None:
            await answer(stream)
            await stream.hear_the_end(patience(20))

        liar.peers.handlers[QUESTION] = on_question
        before = here.peers.guard.refused["false answer"]
        here.peers.guard.forgive(member.peer)
        with pytest.raises(LostError):
            here.peers.background.run(question(), patience(60))
        assert here.peers.guard.refused["false answer"] == before + 1

    def raw(content: bytes) -> Callable[[PeerStream], Awaitable[None]]:
        async def answer(stream: PeerStream) -> None:
            stream.writer.write(content)
            await stream.writer.drain()

        return answer

    def told(frame: dict[str, Any], content: bytes = b"") -> Callable[[PeerStream], Awaitable[None]]:
        text = json.dumps(frame).encode()
        return raw(struct.pack(">I", len(text)) + text + content)

    for frame in REPORTS.values():
        lie(told(frame), lambda: asked.report(TERM))
    for junk in (struct.pack(">I", 40) + b"\xff" * 40, struct.pack(">I", 60_000) + NESTED[:60_000], ENDLESS):
        lie(raw(junk), lambda: asked.report(TERM))
    for answer in (
        learnt(numel, float("nan")),
        learnt(numel, 1e6),
        learnt(numel - 1, 1.0),
        learnt(numel, 1.0, losses="low"),
        learnt(numel, 1.0, learnt=[]),
    ):
        lie(told(*answer), asked.learnt_now)
    for losses in (b"", struct.pack("d", float("inf"))):
        lie(
            told({"learnt": [[0, 0, "1"]], "size": len(losses)}, losses),
            lambda: asked.run(TERM, [Microbatch(0, 0)], None),
        )
    lie(told({"missing": "all", "size": 0}), lambda: asked.gather(TERM, {1: ""}))
    lie(told({"version": -1, "size": 0}), asked.state)
    assert all(torch.equal(one, torch.ones_like(one)) for one in work.learnt.sums.values())

    questions.stall_s = patience(0.25)

    async def silent(stream: PeerStream, _: Any) -> None:
        await asyncio.sleep(patience(60))

    async def working(stream: PeerStream, _: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(patience(0.15))
            await stream.tell(SIGN)
        await stream.tell(report())
        await stream.hear_the_end(patience(20))

    here.peers.guard.forgive(member.peer)
    liar.peers.handlers[QUESTION] = silent
    with pytest.raises(LostError, match="late"):
        here.peers.background.run(asked.report(TERM), patience(20))
    liar.peers.handlers[QUESTION] = working
    assert here.peers.background.run(asked.report(TERM), patience(20)).stage == 1


@pytest.mark.slow
def test_one_that_asks_for_states_and_reads_none_has_one_made_for_it(made: Make) -> None:  # noqa: F811
    swarm, states = made([1, 2]), list[bytes]()
    here, greedy = swarm.of(1)
    honest = swarm.of(0)[0]

    def state() -> tuple[int, bytes]:
        states.append(bytes(1 << 24))
        return 0, states[-1]

    own = Synchronous(here.stage, here.work, None, None, None)  # type: ignore[arg-type]
    Questions(here.peers, own, state, 3, PARTS, LAST, patience(20)).open()
    rank = here.peers.identity.rank

    async def ask() -> None:
        async with greedy.peers.stream(greedy.peers.members.by_rank[rank]) as stream:
            await stream.tell({"kind": QUESTION, "ask": "state"})
            await asyncio.sleep(patience(60))

    asked = [greedy.peers.background.submit(ask()) for _ in range(8)]
    until(lambda: here.peers.guard._streams[greedy.peers.identity.peer] == 8)
    time.sleep(2)
    assert len(states) == 1
    theirs = Questions(honest.peers, own, lambda: (0, b""), 3, PARTS, LAST, patience(20))
    member = honest.peers.members.by_rank[rank]
    found = honest.peers.background.run(Asked(theirs, member)._ask("state", 1 << 24), patience(60))
    assert found[1] == states[1], "others do not wait for it"
    for one in asked:
        one.cancel()


@pytest.mark.slow
def test_no_step_is_taken_without_all_of_its_microbatches_whoever_orders_it(made: Make) -> None:  # noqa: F811
    swarm, taken = made([1, 2]), list[Learnt]()
    here, liar = swarm.of(1)
    rank, target = liar.peers.identity.rank, liar.peers.members.by_rank[here.peers.identity.rank]

    class Alone:
        def living(self) -> dict[int, Participant]:
            return {target.rank: own, rank: own}

    async def take(learnt: Learnt) -> None:
        taken.append(learnt)

    async def stays(version: int, givers: list[int]) -> None:
        raise LostError("nobody is behind")

    own = Synchronous(here.stage, here.work, Alone(), take, stays)
    Questions(here.peers, own, lambda: (0, b""), 3, PARTS, LAST, patience(20)).open()
    leader = Asked(Questions(liar.peers, own, lambda: (0, b""), 3, PARTS, LAST, patience(20)), target)

    def ordered(order: Awaitable[T]) -> T:
        async def go() -> T:
            return await order

        return liar.peers.background.run(go(), patience(60))

    def learn(*numbers: int) -> dict[int, str]:
        here.work.learnt.samples = {Microbatch(0, number): 3 for number in numbers}
        return {target.rank: digest_of(here.work.learnt.samples)}

    with pytest.raises(LostError, match="nobody has learnt"):
        ordered(leader.gather((0, rank), {}))
    for some in ([], [0, 1]):
        assert ordered(leader.gather((0, rank), learn(*some))) == []
        with pytest.raises(LostError, match="without some of its microbatches"):
            ordered(leader.step((0, rank)))
        here.peers.guard.forgive(liar.peers.identity.peer)
    twice = learn(*range(PARTS))
    with pytest.raises(LostError, match="the same microbatch"):
        ordered(leader.gather((0, rank), {**twice, rank: twice[target.rank]}))
    assert here.peers.guard.refused == {"bad request": 3} and not taken and not swarm.told
    assert ordered(leader.gather((0, rank), learn(*range(PARTS)))) == []
    ordered(leader.step((0, rank)))
    assert [len(one.samples) for one in taken] == [PARTS]


@pytest.mark.slow
def test_one_that_leads_alone_leads_nobody_to_a_step_that_the_others_have_not_reached(made: Make) -> None:  # noqa: F811
    swarm, fetched = made([2, 2]), list[int]()
    here, *others = swarm.of(1) + swarm.of(0)
    liar = others.pop()
    rank, target = liar.peers.identity.rank, liar.peers.members.by_rank[here.peers.identity.rank]

    async def fetch(version: int, givers: list[int]) -> None:
        fetched.append(version)

    def at(step: int) -> None:
        for seat in others:
            said = seat.peers.announce(facts={"serves": 1.0}, step=step, rate=1.0)
            seat.peers.background.run(said, patience(20))

    own = Synchronous(here.stage, here.work, None, None, fetch)  # type: ignore[arg-type]
    Questions(here.peers, own, lambda: (0, b""), 3, PARTS, LAST, patience(20)).open()
    leader = Asked(Questions(liar.peers, own, lambda: (0, b""), 3, PARTS, LAST, patience(20)), target)

    def ordered(version: int) -> None:
        liar.peers.background.run(leader.catch_up((0, rank), version, [rank]), patience(60))

    at(5)
    with pytest.raises(LostError, match="hardly anybody has reached the step"):
        ordered(LAST)
    ordered(6)
    at(LAST)
    ordered(LAST)
    assert fetched == [6, LAST] and not here.peers.guard.refused
