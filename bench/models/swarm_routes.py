"""How much of what a swarm's peers can do do routes by throughput get, and what does a route cost?
In virtual time: stages of unlike peers beside fixed pipelines and random permutations, as shares of what the slowest
stage can do; then utilisation over links of 20 Mbit/s beside the square-cube law (SWARM, arXiv 2301.11913): a stage of
l layers of width n computes 72·l·n² FLOP a token and sends n numbers. Takes two minutes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.networks.simulator.event_loop import run_in_virtual_time
from farflung.swarm.letters import Microbatch, Post
from farflung.swarm.moves import Standing, share_under_way
from farflung.swarm.peer import StagePeer, under_way
from farflung.swarm.routers import PermutationRouter, Router, ThroughputRouter
from farflung.swarm.simulated import Links, SimulatedPost, TimeAlone, in_virtual_seconds

Routers = Callable[[Sequence[int], int], Router]

ROUTES: dict[str, Routers] = {
    "by throughput": lambda peers, boundary: ThroughputRouter(peers),
    "fixed": lambda peers, boundary: PermutationRouter(peers, boundary, None),
    "random permutations": lambda peers, boundary: PermutationRouter(peers, boundary, 0),
}
FORWARD = 1 / 3
"""The forward pass's share of a microbatch's seconds."""
SLOW_S = 4.0
"""Seconds that a peer of speed 1 takes for a microbatch, both passes."""


@dataclass(frozen=True)
class Options:
    seconds: float = 3000.0
    """Virtual seconds, of which the first fifth is not counted."""
    flight: tuple[int, ...] = (16, 64)
    """Microbatches under way, all heads together."""
    widths: tuple[int, ...] = (128, 256, 512, 1024)
    """Of the hidden states, for the square-cube law."""
    layers: int = 4
    """Of each stage."""
    mbit: float = 20.0
    """Every peer's link."""
    gflops: float = 20.0
    """What a peer computes a second."""
    tokens: int = 4096
    """Of a microbatch."""
    chosen_from: int = 64
    """Peers of a stage, for the cost of a choice."""


SMOKE = Options(seconds=200.0, flight=(8,), widths=(128,))


@dataclass
class World:
    """Stages of peers: for each, the seconds that each peer takes for a microbatch."""

    stages: list[list[float]]
    links: Links | None = None
    works: list[list[TimeAlone]] = field(default_factory=list)

    def bound(self) -> float:
        """Microbatches a second of the slowest stage, all its peers busy."""
        return min(sum(1 / seconds for seconds in stage) for stage in self.stages)

    def share(self, routes: Routers, flight: int, seconds: float) -> float:
        """Microbatches that came through, beside the bound."""
        return run_in_virtual_time(self._run(routes, flight, seconds)) / self.bound()

    async def _run(self, routes: Routers, flight: int, seconds: float) -> float:
        post = SimulatedPost(links=self.links)
        numbers = itertools.count()
        stages = [[next(numbers) for _ in stage] for stage in self.stages]
        self.works = [[TimeAlone() for _ in stage] for stage in stages]
        for stage, peers in enumerate(stages):
            for place, peer in enumerate(peers):
                onward = routes(stages[stage + 1], stage) if stage + 1 < len(stages) else None
                post.peers[peer] = self._peer(stage, place, post.of(peer), onward)
        running = [asyncio.ensure_future(self._head(post.peers[head], head, flight)) for head in stages[0]]
        await asyncio.sleep(seconds / 5)
        before = self._done()
        await asyncio.sleep(seconds * 4 / 5)
        for one in running:
            one.cancel()
        return (self._done() - before) / (seconds * 4 / 5)

    def _peer(self, stage: int, place: int, post: Post, onward: Router | None) -> StagePeer:
        took = self.stages[stage][place]
        device = in_virtual_seconds(FORWARD * took, (1 - FORWARD) * took)
        clock = asyncio.get_running_loop().time
        return StagePeer(stage, len(self.stages), self.works[stage][place], device, post, onward, 1e9, clock)

    async def _head(self, peer: StagePeer, head: int, under: int) -> None:
        """Keeps microbatches under way whose numbers make them stay in this head's column where routes are fixed."""
        numbers = itertools.count(head, len(self.stages[0]))
        known = [Standing(stage, 1 / seconds) for stage, peers in enumerate(self.stages) for seconds in peers]
        part = share_under_way(dict(enumerate(known)), head, len(self.stages), under / len(known))
        await under_way(lambda: peer.start(Microbatch(0, next(numbers)), 0), lambda: part)

    def _done(self) -> int:
        return sum(len(work.learnt) for work in self.works[-1])


def shuffled(speeds: Sequence[float], stages: int) -> list[list[float]]:
    """Seconds a microbatch: which peers are in one column is chance."""
    drawn = [random.Random(f"{stage} column").sample(speeds, len(speeds)) for stage in range(stages)]
    return [[SLOW_S / speed for speed in stage] for stage in drawn]


def run(options: Options, store: Store) -> Iterator[Part]:
    columns = {"stages": "", "under way": "", **dict.fromkeys(ROUTES, ".1%")}
    yield Table(columns, shares(options), "microbatches, beside what the slowest stage can do with all its peers busy")
    columns = {"width": "", "measured": ".3f", "square-cube law": ".3f", "difference": "+.1%"}
    yield Table(columns, utilisations(options), f"utilisation of peers on links of {options.mbit:g} Mbit/s")
    yield f"a choice among {options.chosen_from} peers: {1e6 * choice_seconds(options.chosen_from):.1f} us"


def shares(options: Options) -> Iterator[Sequence[Cell]]:
    worlds = {
        "4 of speeds 1:1:2:4": shuffled((1, 1, 2, 4), 4),
        "3, 4, 6 and 3 equal peers": [[SLOW_S] * peers for peers in (3, 4, 6, 3)],
    }
    for name, stages in worlds.items():
        for flight in options.flight:
            found = [World(stages).share(routes, flight, options.seconds) for routes in ROUTES.values()]
            yield name, str(flight), *found


def utilisations(options: Options) -> Iterator[Sequence[Cell]]:
    """Of four stages with two peers each, whose hidden states travel as float32."""
    for width in options.widths:
        computes = 72 * options.layers * width**2 * options.tokens / (1e9 * options.gflops)
        packet = 4.0 * width * options.tokens
        # Between two stages, hidden states go one way and gradients the other: an inner peer sends both.
        law = min(1.0, computes / (2 * 8e-6 * packet / options.mbit))
        world = World([[computes] * 2] * 4, Links(lambda _: options.mbit, packet))
        measured = world.share(ROUTES["by throughput"], 32, 200 * max(computes, computes / law))
        yield str(width), measured, law, measured / law - 1


def choice_seconds(peers: int) -> float:
    router = ThroughputRouter(range(peers))
    began, count = time.perf_counter(), 20_000
    for number in range(count):
        peer = router.choose(Microbatch(0, number))
        assert peer is not None
        router.observe(peer, 1.0 + peer)
    return (time.perf_counter() - began) / count
