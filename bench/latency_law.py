"""A pair's average against a tree all-reduce, when the time of messages is log-normal: the ratio goes as log2(N).

    python bench/latency_law.py [--sigmas 0 0.25 0.5 1] [--trials 20] [--plot law.html]

On the simulated network's clock and meetings, with messages whose bytes take no time. A pair averages as farflung's
does, in two hops: each sends the other its part, then the average of its own. The tree is binomial: log2(N) levels
of pairs up and as many down, and a replica goes on when its own pair has met. NoLoCo (arXiv 2506.10911) gives the law.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import plotly.graph_objects as go
import tyro

from farflung.networks import Conditions
from farflung.networks.simulator import Demand, SimulatedCluster, SimulatedCollective

REPLICAS = tuple(2**power for power in range(1, 11))
Replica = Generator[SimulatedCollective, None, None]


@dataclass(frozen=True)
class Options:
    sigmas: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    """Spreads of the latency (log-normal, median 100 ms)."""
    trials: int = 20
    """Seeds that each figure is the mean of."""
    plot: Path | None = None
    """Write a picture to this HTML file."""


def hop(brought: dict[int, None]) -> Iterator[Demand]:
    yield Demand.alike(tuple(sorted(brought)), 0.0)


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


def seconds(average: object, replicas: int, sigma: float, seed: int) -> list[float]:
    """When each replica has its average."""
    cluster = SimulatedCluster(replicas, Conditions(latency_ms=100, latency_sigma=sigma, seed=seed))
    ended = [0.0] * replicas
    running = [average(cluster, rank, replicas) for rank in range(replicas)]  # type: ignore[operator]

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


def main(options: Options) -> None:
    print("tree all-reduce / pair average, mean of trials +- standard error; log2(N) is the law")
    print(f"{'N':>5} {'log2(N)':>8} " + " ".join(f"{f'sigma {sigma:g}':>14}" for sigma in options.sigmas))
    curves: dict[float, list[float]] = {sigma: [] for sigma in options.sigmas}
    for replicas in REPLICAS:
        cells = []
        for sigma in options.sigmas:
            ratios = [ratio(replicas, sigma, seed) for seed in range(options.trials)]
            curves[sigma].append(mean(ratios))
            cells.append(f"{mean(ratios):7.2f} +-{stdev(ratios) / len(ratios) ** 0.5:5.2f}")
        print(f"{replicas:5} {math.log2(replicas):8.1f} " + " ".join(cells), flush=True)
    if options.plot:
        figure = go.Figure()
        for sigma, curve in curves.items():
            figure.add_scatter(x=REPLICAS, y=curve, name=f"sigma {sigma:g}", mode="lines+markers")
        law = {"color": "black", "dash": "dot"}
        figure.add_scatter(x=REPLICAS, y=[math.log2(n) for n in REPLICAS], name="log2(N)", line=law)
        figure.update_layout(template="plotly_white", xaxis_title="replicas", yaxis_title="tree all-reduce / pair")
        figure.update_xaxes(type="log", dtick=math.log10(2))
        figure.write_html(options.plot, include_plotlyjs=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
