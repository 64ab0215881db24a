"""How much faster are found placements than random ones, and does the simulator agree with the planner's cost?
64 machines, 8 stages of 8 replicas, in the five settings of DT-FM (arXiv 2206.01288), whose least ratios are to be
reached; the baseline is random placements. Its cost counts what a replica averages with its seven partners one after
the other; on the simulated network these run at the same time, which is all that the last column has less. Takes a
minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.networks import Conditions, conditions_named
from farflung.networks.simulator.cluster import SimulatedCluster
from farflung.networks.simulator.conditions import Link, Site
from farflung.networks.simulator.fabric import Demand
from farflung.planner.placement import Groups, Problem, chains, random_placement, search

GBIT = 125e6

World = tuple[NDArray[np.float64], NDArray[np.float64], Conditions]
"""Latency and bandwidth between devices, as matrices, and as the simulated network has them."""


@dataclass(frozen=True)
class Options:
    seconds: float = 20.0
    """Longest search for each setting."""
    draws: int = 200
    """Random placements that their mean is of."""
    seed: int = 0
    """Of the draws and the search."""
    settings: int = 5
    """How many of DT-FM's settings to go through."""


SMOKE = Options(seconds=0.2, draws=2, settings=1)


def world(
    sizes: list[int], inside: list[tuple[float, float]], between: Mapping[tuple[int, int], tuple[float, float]]
) -> World:
    """Latency (ms) and bandwidth (Gbit/s) inside each place and between places, as matrices over devices."""
    place = np.repeat(np.arange(len(sizes)), sizes)
    latency, bandwidth = np.zeros((len(sizes), len(sizes))), np.zeros((len(sizes), len(sizes)))
    for number, (ms, gbit) in enumerate(inside):
        latency[number, number], bandwidth[number, number] = ms, gbit
    for (one, other), (ms, gbit) in between.items():
        latency[one, other] = latency[other, one] = ms
        bandwidth[one, other] = bandwidth[other, one] = gbit
    sites = tuple(Site(str(number), weight=size) for number, size in enumerate(sizes))
    links = tuple(
        Link((str(one), str(other)), latency[one, other], 1000 * bandwidth[one, other])
        for one in range(len(sizes))
        for other in range(one, len(sizes))
    )
    conditions = Conditions(bandwidth_mbps=1e9, sites=sites, links=links)
    return latency[np.ix_(place, place)] / 1000, bandwidth[np.ix_(place, place)] * GBIT, conditions


def alike(places: int, ms: float, gbit: float) -> dict[tuple[int, int], tuple[float, float]]:
    return dict.fromkeys(combinations(range(places), 2), (ms, gbit))


REGIONS = dict(
    zip(
        combinations(range(4), 2),  # Virginia, Oregon, California, Ohio
        [(67, 1.15), (59, 1.05), (11, 1.12), (12, 1.25), (49, 1.10), (52, 1.02)],
        strict=True,
    )
)


def settings() -> dict[str, tuple[World, float]]:
    measured = conditions_named("world")
    links = {pair: measured.link(*pair) for pair in combinations(range(8), 2)}
    cities = {pair: (link.latency_ms, link.bandwidth_mbps / 1000) for pair, link in links.items()}
    spot = [4] * 8 + [1] * 32
    return {
        "1 one data centre": (world([8] * 8, [(0, 100)] * 8, alike(8, 0, 3.125)), 5.5),
        "2 spot instances": (world(spot, [(0, 100)] * 40, alike(40, 0, 1.25)), 1.0),
        "3 two universities": (world([32] * 2, [(1, 5)] * 2, alike(2, 11, 1.12)), 3.4),
        "4 four regions": (world([16] * 4, [(5, 2)] * 4, REGIONS), 1.7),
        "5 eight cities": (world([8] * 8, [(5, 2)] * 8, cities), 3.4),
    }


def as_it_falls(problem: Problem, placement: Groups, random: np.random.Generator) -> float:
    """The cost without matching or ordering: each replica's stages as they come."""
    order = [random.permutation(group) for group in placement]
    edges = [problem.pp_seconds[one, other].max() for one, other in pairwise(order)]
    return problem.cost(placement) - problem.pipeline(placement)[0] + float(sum(edges))


def simulated(conditions: Conditions, problem: Problem, placement: Groups) -> float:
    """The same step on the simulated network: forward and back along each replica, then all averages at once.

    Each connection has its link's bandwidth to itself, so that a replica hears from all others at the same time.
    """
    cluster = SimulatedCluster(problem.devices, conditions)
    replicas = chains(problem, placement)
    walking = len(replicas)

    def walk(route: list[tuple[int, int]]) -> None:
        nonlocal walking
        if route:
            (one, other), *rest = route
            demand = Demand((one, other), (problem.pp_bytes, 0.0), (0.0, problem.pp_bytes), problem.pp_bytes)
            cluster.fabric.send(demand, f"{route}", lambda: walk(rest))
            return
        walking -= 1
        if not walking:
            for group in placement:
                average(group, hops=2)

    def average(group: tuple[int, ...], hops: int) -> None:
        if hops:
            demand = Demand.even(group, problem.dp_bytes / len(group))
            cluster.fabric.send(demand, f"{group} {hops}", lambda: average(group, hops - 1))

    for replica in replicas:
        steps = list(pairwise(replica))
        walk([*steps, *((other, one) for one, other in reversed(steps))])
    while cluster.clock.advance():
        pass
    return cluster.clock.now


def run(options: Options, store: Store) -> Iterator[Part]:
    yield "random: devices fall into replicas and stages as they come; ordered: such splits, best matched and ordered"

    def row(name: str, matrices: World, least: float) -> tuple[Cell, ...]:
        latency, bandwidth, conditions = matrices
        problem = Problem(latency, bandwidth, groups=8, dp_bytes=0.65e9, pp_bytes=0.471e9)
        random = np.random.default_rng(options.seed)
        drawn = [random_placement(problem, random) for _ in range(options.draws)]
        ordered = float(np.mean([problem.cost(placement) for placement in drawn]))
        mean = float(np.mean([as_it_falls(problem, placement, random) for placement in drawn]))
        began = time.monotonic()
        found, placement = search(problem, options.seconds, options.seed)
        took = time.monotonic() - began
        ratios = mean / found, least, ordered / found
        return name, mean, ordered, found, *ratios, took, simulated(conditions, problem, placement)

    columns = {"setting": "", "random, s": ".2f", "ordered, s": ".2f", "found, s": ".2f", "random/found": ".2f"}
    columns |= {"to reach": ".1f", "ordered/found": ".2f", "search, s": ".1f", "simulated, s": ".2f"}
    chosen = list(settings().items())[: options.settings]
    yield Table(columns, (row(name, matrices, least) for name, (matrices, least) in chosen))
