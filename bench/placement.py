"""Where to put 64 machines' stages and replicas: what the search finds against random placements.

    python bench/placement.py [--seconds 20] [--draws 200]

The five settings of DT-FM (arXiv 2206.01288), 8 stages of 8 replicas, and the least ratios that are to be reached.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import tyro

from farflung.networks import conditions_named
from farflung.planner.placement import Groups, Problem, random_placement, search

GBIT = 125e6


@dataclass(frozen=True)
class Options:
    seconds: float = 20.0
    """Longest search for each setting."""
    draws: int = 200
    """Random placements that their mean is of."""
    seed: int = 0


def world(sizes: list[int], inside: list[tuple[float, float]], between: dict[tuple[int, int], tuple[float, float]]):  # type: ignore[no-untyped-def]
    """Latency (ms) and bandwidth (Gbit/s) inside each place and between places, as matrices over devices."""
    place = np.repeat(np.arange(len(sizes)), sizes)
    latency, bandwidth = np.zeros((len(sizes), len(sizes))), np.zeros((len(sizes), len(sizes)))
    for number, (ms, gbit) in enumerate(inside):
        latency[number, number], bandwidth[number, number] = ms, gbit
    for (one, other), (ms, gbit) in between.items():
        latency[one, other] = latency[other, one] = ms
        bandwidth[one, other] = bandwidth[other, one] = gbit
    return latency[np.ix_(place, place)] / 1000, bandwidth[np.ix_(place, place)] * GBIT


def alike(places: int, ms: float, gbit: float) -> dict[tuple[int, int], tuple[float, float]]:
    return dict.fromkeys(combinations(range(places), 2), (ms, gbit))


REGIONS = dict(
    zip(
        combinations(range(4), 2),  # Virginia, Oregon, California, Ohio
        [(67, 1.15), (59, 1.05), (11, 1.12), (12, 1.25), (49, 1.10), (52, 1.02)],
        strict=True,
    )
)


def settings() -> dict[str, tuple[object, float]]:
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


def main(options: Options) -> None:
    print("random: devices fall into replicas and stages as they come; ordered: such splits, best matched and ordered")
    print(
        f"{'setting':20} {'random, s':>10} {'ordered, s':>10} {'found, s':>9} {'random/found':>12} {'to reach':>8} "
        f"{'ordered/found':>13} {'search, s':>9}"
    )
    for name, ((latency, bandwidth), least) in settings().items():  # type: ignore[misc]
        problem = Problem(latency, bandwidth, groups=8, dp_bytes=0.65e9, pp_bytes=0.471e9)
        random = np.random.default_rng(options.seed)
        drawn = [random_placement(problem, random) for _ in range(options.draws)]
        ordered = float(np.mean([problem.cost(placement) for placement in drawn]))
        mean = float(np.mean([as_it_falls(problem, placement, random) for placement in drawn]))
        began = time.monotonic()
        found, _ = search(problem, options.seconds, options.seed)
        took = time.monotonic() - began
        print(
            f"{name:20} {mean:10.2f} {ordered:10.2f} {found:9.2f} {mean / found:12.2f} {least:8.1f} "
            f"{ordered / found:13.2f} {took:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
