"""Microbatches that visit real peers, each with a libp2p host of its own, on loopback."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from patience import patience, until
from processes import free_port
from test_internet import INFO
from test_swarm_training import OPTIMIZERS, Piece, batch_of, boundary, pieces, work_of
from torch import Tensor

from farflung.networks.internet import Identity, ListenAddress, Peers, Ticket
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.peers.frames import Frame, FrameError, write_payload
from farflung.swarm import signs
from farflung.swarm.letters import Caller, Forward, Gradient, Microbatch
from farflung.swarm.peer import StagePeer
from farflung.swarm.processor import Pass, Processor, T
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.visits import VISIT, Visits, read_visit, told_visit


class Seat:
    """One peer of a swarm: its host, and its stage."""

    def __init__(self, peers: Peers, stage: int, stages: int) -> None:
        self.peers, self.stages, self.rank = peers, stages, peers.identity.rank
        self.work = work_of(stage, stages, OPTIMIZERS["sgd"])
        room = boundary().room()
        entering, leaving = room if stage else None, room if stage < stages - 1 else None
        self.visits = Visits(peers, stage, stages, entering, leaving, self.serve, patience(20), patience(60))
        self.router = ThroughputRouter() if leaving is not None else None
        self.seconds = 0.0
        self.stage = StagePeer(
            stage, stages, self.work, Processor(self.compute), self.visits, self.router, patience(60), time.monotonic
        )
        self.visits.open()

    async def compute(self, which: Pass, work: Callable[[], T]) -> T:
        await asyncio.sleep(self.seconds)
        return await asyncio.to_thread(work)

    async def serve(self, forward: Forward, caller: Caller) -> None:
        await self.stage.serve(forward, caller)

    def start(self, microbatches: list[Microbatch], told: Callable[[], Awaitable[None]] | None = None) -> list[float]:
        async def all_of_them() -> list[float]:
            runs = [asyncio.ensure_future(self.stage.start(one, 0)) for one in microbatches]
            if told:
                await told()
            return await asyncio.gather(*runs)

        return self.peers.background.run(all_of_them(), patience(120))


class Swarm:
    """Peers of stages, in this process."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        port = free_port()
        first = Identity(folder / "0.key")
        ticket = Ticket.new("test", {}).at((f"/ip4/127.0.0.1/tcp/{port}/p2p/{first.peer}",))
        self.told: list[str] = []
        self.seats: list[Seat] = []
        for stage in [stage for stage, size in enumerate(sizes) for _ in range(size)]:
            number = len(self.seats)
            local = ListenAddress("127.0.0.1", 0 if number else port)
            identity = Identity(folder / f"{number}.key")
            peers = Peers(ticket, identity, local, dict(INFO), self.told.append, first=not number)
            peers.start(patience(40))
            self.seats.append(Seat(peers, stage, len(sizes)))
        until(lambda: all(len(seat.peers.members.proven()) == len(self.seats) - 1 for seat in self.seats))
        for seat in self.seats:
            for other in self.of(seat.stage.stage + 1):
                assert seat.router is not None
                seat.router.join(other.peers.identity.rank)

    def of(self, stage: int) -> list[Seat]:
        return [seat for seat in self.seats if seat.stage.stage == stage]

    def counted(self, stage: int) -> Counter[Microbatch]:
        return Counter(one for seat in self.of(stage) for one in seat.work.learnt.samples)

    def settle(self) -> None:
        until(lambda: not any(seat.stage.under_way for seat in self.seats))

    def close(self) -> None:
        for seat in self.seats:
            seat.peers.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[list[int]], Swarm]]:
    swarms: list[Swarm] = []

    def make(sizes: list[int]) -> Swarm:
        swarms.append(Swarm(tmp_path, sizes))
        return swarms[-1]

    yield make
    for one in swarms:
        one.close()


Make = Callable[[list[int]], Swarm]


def gradients(stages: int, microbatches: list[Microbatch]) -> list[Piece]:
    """One process with the whole model: nothing but torch."""
    made = pieces(stages)
    for one in microbatches:
        leaving = batch = batch_of(one)
        for piece in made:
            leaving = piece(leaving)
        (made[-1].loss(leaving, batch) * len(batch)).backward()
    return made


def loss_of(made: list[Piece], batch: Tensor) -> float:
    leaving = batch
    for piece in made:
        leaving = piece(leaving)
    return made[-1].loss(leaving, batch).item()


def assert_learnt(swarm: Swarm, stage: int, piece: Piece) -> None:
    for name, parameter in piece.named_parameters():
        total = sum(seat.work.learnt.sums[name] for seat in swarm.of(stage))
        torch.testing.assert_close(total, parameter.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_equal_those_of_one_process_and_a_death_is_routed_around(made: Make) -> None:
    swarm = made([1, 2, 2])
    before, after = [[Microbatch(0, number) for number in range(begin, begin + 12)] for begin in (0, 12)]
    losses = swarm.seats[0].start(before)
    swarm.settle()
    reference = gradients(3, before)
    assert len(losses) == len(before)
    for stage in range(3):
        assert swarm.counted(stage) == Counter(before)
        assert_learnt(swarm, stage, reference[stage])
    assert all(seat.work.learnt.samples for seat in swarm.seats)
    sent = [sum(seat.visits.traffic.bytes_sent for seat in swarm.of(stage)) for stage in range(3)]
    assert sent == [len(before) * packets * boundary().nbytes for packets in (1, 2, 1)], "there and back"

    judged = swarm.seats[0].stage.start(Microbatch(7, 0), 0, frozenset())
    loss = swarm.seats[0].peers.background.run(judged, patience(60))
    assert loss == pytest.approx(loss_of(reference, batch_of(Microbatch(7, 0))))
    assert swarm.counted(2) == Counter(before), "nobody learns from what is only judged"

    dies, lives = swarm.of(1)
    for seat in swarm.seats:
        seat.seconds = 0.05

    async def death() -> None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(dies.peers.close)

    swarm.seats[0].start(after, death)
    swarm.seats.remove(dies)
    swarm.settle()
    assert swarm.counted(0) == Counter(before + after)
    # What was on its way through the one that died may be lost with it, and is then learnt by nobody behind.
    assert swarm.counted(2) <= Counter(before + after)
    assert len(swarm.counted(2)) >= len(before) + 1
    for stage in (0, 2):
        assert_learnt(swarm, stage, gradients(3, list(swarm.counted(stage)))[stage])
    assert set(lives.work.learnt.samples) <= set(before + after)
    assert sum(swarm.seats[0].stage.struck.values()) > 0


@pytest.mark.slow
def test_who_is_silent_is_passed_by_and_who_is_only_slow_is_waited_for(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs, "EVERY_SECONDS", 0.1)
    swarm = made([1, 2])
    head, slow, silent = swarm.seats
    for seat in swarm.seats:
        seat.visits.stall_s = patience(0.25)
    slow.seconds = patience(0.3)

    async def nothing(stream: PeerStream, frame: Frame) -> None:
        await asyncio.sleep(patience(120))

    silent.peers.handlers[VISIT] = nothing
    both = [Microbatch(0, number) for number in range(2)]
    head.start(both)
    swarm.settle()
    assert swarm.counted(0) == swarm.counted(1) == Counter(both)
    assert head.stage.struck == {"gone": 1}

    slow.seconds = 0.0
    packet = torch.zeros(3, 6)

    async def stands_still() -> None:
        async with asyncio.timeout(patience(20)), head.peers.stream(head.peers.members.by_rank[slow.rank]) as stream:
            await stream.tell({**told_visit(Forward(Microbatch(0, 2), 1, 0)), "size": packet.nbytes})
            await write_payload(stream.writer, packet.numpy().view("u1").reshape(-1).data, patience(5))
            await signs.heard(stream, patience(5))
            while slow.stage.under_way:
                await asyncio.sleep(0.1)

    head.peers.background.run(stands_still(), patience(30))
    assert swarm.counted(1) == Counter(both), "a gradient of which nobody says whether it is kept is taken back"


LIES: list[Callable[[Tensor], Tensor]] = [
    lambda packet: packet[:, :2],
    lambda packet: packet * torch.nan,
    lambda packet: packet * 1e6,
]


@pytest.mark.slow
def test_peers_whose_gradients_are_false_are_refused_counted_and_routed_around(made: Make) -> None:
    swarm = made([1, 1 + len(LIES)])
    head, liars = swarm.seats[0], swarm.of(1)[1:]
    many = [Microbatch(0, number) for number in range(24)]
    for one in many:
        head.start([one])  # what is usual is known then
    for liar, lie in zip(liars, LIES, strict=True):

        def backward(forward: Forward, gradient: Gradient, work: Any = liar.work, lie: Any = lie) -> Gradient:
            true = type(work).backward(work, forward, gradient)
            return Gradient(lie(true.packet), true.loss)

        liar.work.backward = backward  # type: ignore[method-assign]
    while head.peers.guard.refused["false gradient"] < len(LIES) and len(many) < 500:
        many.append(Microbatch(0, len(many)))
        head.start(many[-1:])
    swarm.settle()
    assert swarm.counted(0) == Counter(many)
    assert_learnt(swarm, 0, gradients(2, many)[0])
    for stage in (0, 1):
        assert max(swarm.counted(stage).values()) == 1
    told = [
        "a gradient that is far too large",
        "a packet has 24 bytes; 72 were expected",
        "numbers that are not finite",
    ]
    assert head.stage.struck == dict.fromkeys(told, 1)


@pytest.mark.slow
def test_what_cannot_be_a_visit_is_refused_and_its_sender_struck(made: Make) -> None:
    swarm = made([1, 1])
    head, target = swarm.seats
    member = head.peers.members.by_rank[target.peers.identity.rank]

    async def sent(forward: Forward, packet: Tensor) -> None:
        async with head.peers.stream(member) as stream:
            await stream.tell({**told_visit(forward), "size": packet.nbytes})
            await write_payload(stream.writer, packet.numpy().view("u1").reshape(-1).data, patience(5))
            await stream.hear(patience(20))

    for forward, packet, why in (
        (Forward(Microbatch(0, 0), 1, 0), torch.zeros(3, 5), "60 bytes; 72 were expected"),
        (Forward(Microbatch(0, 0), 1, 0), torch.full((3, 6), torch.nan), "not finite"),
        (Forward(Microbatch(0, 0), 0, 0), torch.zeros(3, 6), "stage 0 is not served here"),
        (Forward(Microbatch(0, 0), 1, 5), torch.zeros(3, 6), "weights of another step"),
        (Forward(Microbatch(0, 0), 7, 0), torch.zeros(3, 6), "no whole number from 0 to 1"),
    ):
        with pytest.raises(RequestRefusedError, match=why):
            head.peers.background.run(sent(forward, packet), patience(60))
    swarm.settle()
    assert not target.work.learnt.samples
    assert target.peers.guard.refused["bad request"] == 3  # all but another stage, and another step


@given(
    st.builds(Microbatch, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9)),
    st.integers(0, 7),
    st.integers(0, 10**9),
    st.none() | st.frozensets(st.integers(0, 7), max_size=8),
)
def test_a_visit_is_read_as_it_was_told(
    microbatch: Microbatch, stage: int, version: int, counts: frozenset[int] | None
) -> None:
    forward = Forward(microbatch, stage, version, counts)
    assert read_visit(told_visit(forward), 8, 10) == forward
    told = replace(forward, counts_in=frozenset(), text=(0, 9))
    assert read_visit(told_visit(told), 8, 10) == told
    for text in ((10,), (-1,)):
        with pytest.raises(FrameError):
            read_visit(told_visit(replace(told, text=text)), 8, 10)
    if not forward.judged:
        with pytest.raises(FrameError, match="to be learnt from"):
            read_visit(told_visit(replace(forward, text=(1,))), 8, 10)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(["microbatch", "stage", "version", "counts_in", "text"], JSON)))
def test_whatever_comes_in_place_of_a_visit_is_refused_or_read(frame: dict[str, object]) -> None:
    try:
        read = read_visit(frame, 4, 10)
    except FrameError:
        return
    assert 0 <= read.stage < 4
