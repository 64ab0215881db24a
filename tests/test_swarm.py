"""Swarms in virtual time: whatever dies or is late, no stage learns from a microbatch twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.swarm.letters import LostError, Microbatch
from farflung.swarm.peer import StagePeer
from farflung.swarm.routers import PermutationRouter, ThroughputRouter
from farflung.swarm.simulated import SimulatedPost, TimeAlone, in_virtual_seconds


class World:
    """Stages of peers, some of which die while a number of microbatches is trained on."""

    def __init__(self, seed: int, stages: int, deaths: int, patience: float) -> None:
        self.random = random.Random(seed)
        sizes = [self.random.randint(1, 3) for _ in range(stages)]
        self.stage_of = dict(enumerate(stage for stage, size in enumerate(sizes) for _ in range(size)))
        self.deaths, self.patience = deaths, patience
        self.post = SimulatedPost(lambda a, b: self.random.uniform(0, 0.3))
        self.kept: list[tuple[int, Microbatch]] = []
        self.work = {peer: TimeAlone() for peer in self.stage_of}

    def peers_of(self, stage: int) -> list[int]:
        return [peer for peer, own in self.stage_of.items() if own == stage]

    async def run(self, microbatches: int) -> None:
        clock = asyncio.get_running_loop().time
        last = max(self.stage_of.values())
        for peer, stage in self.stage_of.items():
            onward = ThroughputRouter(self.peers_of(stage + 1)) if stage < last else None
            quick = in_virtual_seconds(self.random.uniform(0.1, 2), self.random.uniform(0.1, 3))
            post = self.post.of(peer)
            self.post.peers[peer] = StagePeer(
                stage, last + 1, self.work[peer], quick, post, onward, self.patience, clock
            )
        heads = self.peers_of(0)
        runs = [self.head(heads[n % len(heads)], n) for n in range(microbatches)]
        killer = asyncio.ensure_future(self.kill())
        async with asyncio.timeout(100_000):
            await asyncio.gather(*runs)
        await killer
        await asyncio.sleep(1000)

    async def head(self, head: int, number: int) -> None:
        microbatch = Microbatch(0, number)
        if head in self.post.peers:
            run = self.post.spawn(head, self.post.peers[head].start(microbatch, 0))
            await asyncio.wait([run])
            if not run.cancelled() and run.exception() is None:
                self.kept.append((head, microbatch))

    async def kill(self) -> None:
        for _ in range(self.deaths):
            await asyncio.sleep(self.random.uniform(0, 6))
            living = [
                peer
                for peer in self.post.peers
                if any(one in self.post.peers and one != peer for one in self.peers_of(self.stage_of[peer]))
            ]
            if living:
                self.post.kill(self.random.choice(living))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(1, 4),
    deaths=st.integers(0, 5),
    patience=st.sampled_from([2.0, 8.0, 1000.0]),
)
def test_no_stage_learns_from_a_microbatch_twice_and_none_is_lost_but_with_who_had_it(
    seed: int, stages: int, deaths: int, patience: float
) -> None:
    world = World(seed, stages, deaths, patience if stages == 1 or patience > 100 else patience * 4)
    run_in_virtual_time(world.run(20))
    living = world.post.peers
    for stage in range(stages):
        counted = Counter(f.microbatch for peer in world.peers_of(stage) for f in world.work[peer].learnt)
        among_living = Counter(
            f.microbatch for peer in world.peers_of(stage) if peer in living for f in world.work[peer].learnt
        )
        assert max(among_living.values(), default=1) == 1
        lost = {microbatch for _, microbatch in world.kept} - set(counted)
        if all(peer in living for peer in world.stage_of):
            assert not lost
            assert len(world.kept) == 20


def test_the_same_world_again_is_the_same_to_the_bit() -> None:
    def told() -> list[tuple[int, Microbatch]]:
        world = World(5, 4, 3, 100.0)
        run_in_virtual_time(world.run(30))
        return world.kept

    assert told() == told()


@pytest.mark.parametrize("seed", range(5))
def test_each_peer_gets_a_share_that_is_proportional_to_its_speed(seed: int) -> None:
    seconds = {peer: random.Random(seed * 10 + peer).uniform(0.5, 4) for peer in range(5)}
    router, given_to = ThroughputRouter(list(seconds)), Counter[int]()
    for number in range(3000):
        peer = router.choose(Microbatch(0, number))
        assert peer is not None
        router.observe(peer, seconds[peer])
        given_to[peer] += 1
    total = sum(1 / each for each in seconds.values())
    for peer, each in seconds.items():
        assert given_to[peer] / 3000 == pytest.approx(1 / each / total, rel=0.05)


def test_who_left_is_not_chosen_until_it_joins_again_and_a_newcomer_comes_next() -> None:
    router = ThroughputRouter([1, 2])
    for number in range(10):
        assert router.choose(Microbatch(0, number)) in (1, 2)
    router.leave(1)
    assert {router.choose(Microbatch(0, n)) for n in range(5)} == {2}
    router.join(1)
    assert router.choose(Microbatch(0, 0)) == 1
    assert router.choose(Microbatch(0, 0), without=(1, 2)) is None


@given(st.integers(0, 100), st.integers(1, 6), st.integers(0, 5))
def test_random_routes_are_permutations_of_each_turn(seed: int, peers: int, turn: int) -> None:
    router = PermutationRouter(range(peers), 0, seed)
    numbers = range(turn * peers, (turn + 1) * peers)
    assert {router.choose(Microbatch(3, number)) for number in numbers} == set(range(peers))


def test_coroutines_that_all_wait_for_each_other_are_told() -> None:
    async def for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="wait for each other"):
        run_in_virtual_time(for_ever())


def test_a_lost_error_of_a_peer_is_no_error_of_the_head() -> None:
    world = World(1, 3, 0, 1000.0)

    class Broken(TimeAlone):
        def forward(self, forward: object) -> None:
            raise LostError("a packet of another shape")

    async def main() -> None:
        world.stage_of = {0: 0, 1: 1, 2: 1, 3: 2}
        world.work = {peer: TimeAlone() for peer in world.stage_of} | {1: Broken()}
        await world.run(10)

    run_in_virtual_time(main())
    assert len(world.kept) == 10
    assert world.post.peers[0].struck == {"a packet of another shape": 1}
    assert not world.work[1].learnt
    assert len(world.work[2].learnt) == 10
