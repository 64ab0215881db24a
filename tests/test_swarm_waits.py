"""How long peers of a swarm wait for each other."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.swarm.letters import Microbatch
from farflung.swarm.peer import StagePeer
from farflung.swarm.routers import ThroughputRouter
from farflung.swarm.simulated import SimulatedPost, TimeAlone, in_virtual_seconds
from farflung.swarm.waits import LATE, LEAST_SECONDS, PEERS, Waits, without_late

SECONDS = st.floats(0.01, 1e4)


@given(st.lists(SECONDS, min_size=1, max_size=40), SECONDS)
def test_no_peer_is_late_that_takes_as_long_as_it_did_before(taken: list[float], longest: float) -> None:
    waits = Waits(longest)
    assert waits.seconds(0) == longest, "nothing is known yet"
    for seconds in taken:
        waits.took(0, seconds)
    assert waits.seconds(0) == min(longest, LEAST_SECONDS + LATE * max(taken[-32:]))


@given(st.lists(SECONDS, min_size=3, max_size=9), SECONDS)
def test_one_alone_cannot_have_the_others_waited_for(taken: list[float], slow: float) -> None:
    waits = Waits(math.inf)
    for peer, seconds in enumerate(taken):
        waits.took(peer, seconds)
    waits.took(len(taken), slow)
    newcomer = waits.seconds(99)
    assert min(taken) <= (newcomer - LEAST_SECONDS) / LATE + 1e-9
    assert (newcomer - LEAST_SECONDS) / LATE <= sorted(taken)[len(taken) // 2] + 1e-9


def test_who_does_not_deliver_is_left_out_for_ever_longer_until_it_delivers() -> None:
    waits = Waits(1000.0)
    waits.took(1, 5.0)
    first = waits.seconds(2)
    waits.failed(2, 30.0, now=0.0)
    waits.failed(2, 30.0, now=1.0)  # it had two in hand
    assert waits.left_out(299.0) == {2} and waits.left_out(301.0) == set()
    assert waits.seconds(2) == 2 * first
    waits.failed(2, 30.0, now=301.0)
    assert waits.left_out(900.0) == {2} and waits.left_out(902.0) == set()
    waits.took(2, 5.0)
    assert waits.seconds(2) == first and waits.left_out(301.0) == set()


def test_peers_that_come_and_go_are_forgotten() -> None:
    waits = Waits(math.inf)
    for peer in range(10 * PEERS):
        waits.took(peer, 1.0)
        waits.failed(-1 - peer, 1.0, now=1000.0 * peer)
    assert len(waits._took) <= PEERS and len(waits._out_until) <= PEERS and len(waits._failed) <= PEERS


def test_answers_are_waited_for_until_they_are_late_beside_half_of_the_others() -> None:
    async def asked(*seconds: float) -> tuple[list[bool], float]:
        answers = {one: asyncio.ensure_future(asyncio.sleep(one)) for one in seconds}
        await without_late(answers, lambda _, half: 3 * half)
        ended = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        return [answer.cancelled() for answer in answers.values()], ended

    assert run_in_virtual_time(asked(1.0, 2.0, 5.0, 7.0)) == ([False, False, False, True], 6.0)
    assert run_in_virtual_time(asked(4.0)) == ([False], 4.0), "of one alone nobody knows"


def test_peers_that_take_long_on_purpose_cost_a_head_some_deadlines() -> None:
    """Of three, one answers nothing and one takes 500 s; alone, the third one does 400 microbatches in 800 s."""

    async def started() -> float:
        clock, post = asyncio.get_running_loop().time, SimulatedPost(lambda a, b: 0.01)
        for peer, seconds in ((1, 1.0), (2, 1e7), (3, 250.0)):
            device = in_virtual_seconds(seconds, seconds)
            post.peers[peer] = StagePeer(1, 2, TimeAlone(), device, post.of(peer), None, 120.0, clock)
        router = ThroughputRouter([1, 2, 3])
        head = StagePeer(0, 2, TimeAlone(), in_virtual_seconds(0.01, 0.01), post.of(0), router, 120.0, clock)
        post.peers[0] = head
        room = asyncio.Semaphore(4)

        async def one(number: int) -> None:
            async with room:
                await head.start(Microbatch(0, number), 0)

        await asyncio.gather(*(one(number) for number in range(400)))
        return clock()

    assert run_in_virtual_time(started()) < 1.25 * 800.0
