"""Does the simulator show the law that a tree all-reduce takes log2(N) times as long as a pair's average?
When the time of messages is log-normal and bytes take none, on the simulated network's clock and collectives: a pair
averages in two hops, each sends the other its part, then the average of its own; the tree is binomial, log2(N) levels
of pairs up and as many down, and a replica goes on when its own pair has met. NoLoCo (arXiv 2506.10911) gives the
law, which is the baseline. Takes a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.networks import Conditions
from farflung.networks.simulator.cluster import SimulatedCluster, SimulatedCollective
from farflung.networks.simulator.fabric import Demand

Replica = Generator[SimulatedCollective, None, None]
Average = Callable[[SimulatedCluster, int, int], Replica]


@dataclass(frozen=True)
class Options:
    sigmas: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    """Spreads of the latency (log-normal, median 100 ms)."""
    trials: int = 20
    """Seeds that each figure is the mean of."""
    powers: int = 10
    """Up to 2 to the power of this many replicas."""


SMOKE = Options(sigmas=(0.0, 1.0), trials=2, powers=3)


def hop(brought: dict[int, None]) -> Iterator[Demand]:
    yield Demand.even(tuple(sorted(brought)), 0.0)


def pair(cluster: SimulatedCluster, rank: int, replicas: int) -> Replica:
    """Two hops with the neighbour."""
    group = tuple(sorted((rank, rank ^ 1)))
    for number in range(2):
        yield cluster.join(rank, group, f"pair {number}", None, hop)


def tree(cluster: SimulatedCluster, rank: int, replicas: int) -> Replica:
    """Up to replica 0, where all is averaged, and down again."""
    levels = range(int(math.log2(replicas)))
    height = next((level for level in levels if rank >> level & 1), len(levels))
    for way, order in (("up", levels), ("down", reversed(levels))):
        for level in order:
            if level <= height and level < len(levels):
                group = tuple(sorted((rank, rank ^ (1 << level))))
                yield cluster.join(rank, group, f"{way} {level}", None, hop)


def seconds(average: Average, replicas: int, sigma: float, seed: int) -> list[float]:
    """When each replica has its average."""
    cluster = SimulatedCluster(replicas, Conditions(latency_ms=100, latency_sigma=sigma, seed=seed))
    ended = [0.0] * replicas
    running = [average(cluster, rank, replicas) for rank in range(replicas)]

    def go_on(rank: int) -> None:
        for meeting in running[rank]:
            if not meeting.settled:
                meeting.waiting.append(lambda: go_on(rank))
                return
        ended[rank] = cluster.clock.now

    for rank in range(replicas):
        go_on(rank)
    while cluster.clock.advance():
        pass
    return ended


def ratio(replicas: int, sigma: float, seed: int) -> float:
    """How much longer the tree takes, until the last has its average, than a pair takes in the mean."""
    return max(seconds(tree, replicas, sigma, seed)) / mean(seconds(pair, replicas, sigma, seed))


def run(options: Options, store: Store) -> Iterator[Part]:
    def row(replicas: int) -> tuple[Cell, ...]:
        cells: list[Cell] = []
        for sigma in options.sigmas:
            ratios = [ratio(replicas, sigma, seed) for seed in range(options.trials)]
            cells += [mean(ratios), stdev(ratios) / len(ratios) ** 0.5]
        return replicas, math.log2(replicas), *cells

    columns = {"N": "d", "log2(N)": ".1f"}
    for sigma in options.sigmas:
        columns |= {f"sigma {sigma:g}": ".2f", f"+- at {sigma:g}": ".2f"}
    about = "tree all-reduce / pair average, mean of trials +- standard error; log2(N) is the law"
    yield Table(columns, (row(2**power) for power in range(1, options.powers + 1)), about)


def plots(store: Store) -> dict[str, Any]:
    """The ratios beside the law."""
    return {"latency-law": partial(draw, store)} if store.told() else {}


def draw(store: Store, path: Path) -> None:
    from bench.lib.plots import plt, save

    ((_, (table,)),) = store.told()[-1:]
    assert isinstance(table, Table)
    replicas, law, *curves = zip(*table.rows, strict=True)
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, curve in zip(list(table.columns)[2::2], curves[::2], strict=True):
        axes.plot(replicas, curve, "o-", label=name)
    axes.plot(replicas, law, "k:", label="log2(N)")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("replicas")
    axes.set_ylabel("tree all-reduce / pair")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
