"""How much of what a swarm's living peers could do is done while they come and go for days?
In virtual time, without tensors: equal peers live 2 hours and are gone half an hour on average; beside the best places
of those that live, with no moves between stages, and with a look for moves every so often or at each change. SWARM
(arXiv 2301.11913) gives 82.7 % without moves and 95.8 % with one every 300 s, on traces of a cloud. Takes five minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.swarm.lives import Lives, share_of_optimal

LOOKS: dict[str, float | None] = {"no moves": None, "every 300 s": 300.0, "every 60 s": 60.0, "at each change": 0.0}
PUBLISHED = 0.827, 0.958


@dataclass(frozen=True)
class Options:
    peers: tuple[int, ...] = (64, 1000)
    """Peers, living or gone."""
    stages: tuple[int, ...] = (4, 8, 16)
    """Stages."""
    hours: float = 32.0
    """Virtual hours."""
    seeds: int = 3
    """Seeds that each figure is the mean of."""


SMOKE = Options(peers=(16,), stages=(4,), hours=2.0, seeds=1)


def run(options: Options, store: Store) -> Iterator[Part]:
    columns = {"peers": "", "stages": "", **dict.fromkeys(LOOKS, ".1%"), "reach": ""}
    yield Table(columns, rows(options), f"share of optimal; published: {PUBLISHED[0]:.1%} and {PUBLISHED[1]:.1%}")


def rows(options: Options) -> Iterator[Sequence[Cell]]:
    for peers in options.peers:
        for stages in options.stages:
            lives = Lives(peers, stages)
            found = {
                name: mean(
                    share_of_optimal(replace(lives, moves_every_s=every), options.hours, seed)
                    for seed in range(options.seeds)
                )
                for name, every in LOOKS.items()
            }
            good = found["no moves"] >= PUBLISHED[0] and found["every 300 s"] >= PUBLISHED[1]
            yield str(peers), str(stages), *found.values(), "ok" if good else "MISSED"
