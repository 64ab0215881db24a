"""Does the gap to synchronous training grow as fast with the number of replicas where there are a hundred rounds?
Rounds every 8 steps with Muon inside and a batch of its own for each replica, at two lengths; with means by lengths and
directions apart (RDA), too. The baseline is ddp with as many replicas; learning rates are those that long_frontier has
found at 8. Takes about half an hour on two cores with one seed, after long_frontier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.lib.runs import Runs, around, changes, regime
from bench.lib.store import Settings, Store
from bench.lib.table import Part, Table
from bench.quality.length import DDP, finite
from bench.quality.scaling import Gaps

WAYS: dict[str, tuple[str, Settings]] = {
    DDP: (DDP, {}),
    "diloco": ("diloco", {}),
    "diloco, RDA": ("diloco", {"fuse": "rda"}),
    "noloco": ("noloco", {}),
}
"""Rows: which row of long_frontier each is, and what it has besides."""


@dataclass(frozen=True)
class Options:
    steps: tuple[int, ...] = (200, 800)
    """Lengths, in inner steps of each replica."""
    replicas: tuple[int, ...] = (4, 8, 16, 32)
    """Copies of the model."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which rows to make, of which ddp is one."""
    seeds: tuple[int, ...] = (0, 1)
    """One run of each row for each."""


SMOKE = Options(steps=(8,), replicas=(2, 4), ways=(DDP, "diloco, RDA"), seeds=(0,))


def run(options: Options, store: Store) -> Iterator[Part]:
    tuned = Store("long_frontier")
    with Runs(store, {}) as runs:
        wanted = [
            settings_of(tuned.chosen_as(WAYS[way][0]), way, steps, replicas)
            for steps in options.steps
            for replicas in options.replicas
            for way in options.ways
        ]
        for future in [future for settings in wanted for future in runs.start_all(settings, options.seeds)]:
            future.result()
    yield from tables(store, options)["long scaling"]


def settings_of(tuned: Settings, way: str, steps: int, replicas: int) -> Settings:
    """A row's settings."""
    return tuned | WAYS[way][1] | regime(steps, replicas=replicas)


def gaps_of(store: Store, options: Options, way: str, steps: int) -> Gaps:
    """A row's gaps to ddp at a length."""
    tuned, points = Store("long_frontier").chosen, list[tuple[int, float]]()
    for replicas in options.replicas:
        own, ddp = (
            finite(store.results(settings_of(tuned.get(WAYS[name][0], {}), name, steps, replicas)))
            for name in (way, DDP)
        )
        points += [(replicas, change) for change in changes(own, ddp)]
    return Gaps("a batch of its own for each", way, points)


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """The gaps by length and replicas, and what a doubling of the replicas adds."""
    found: list[Part] = []
    for steps in options.steps:
        gaps = {way: gaps_of(store, options, way, steps) for way in options.ways if way != DDP}
        shown = {way: each for way, each in gaps.items() if len({number for number, _ in each.points}) > 1}
        numbers = [n for n in options.replicas if any(each.at(n) for each in shown.values())]
        lines = [
            (
                way,
                *(around(found_at, 2, "+") if (found_at := each.at(n)) else "" for n in numbers),
                f"{each.line(each.points)[1]:+.2f}",
            )
            for way, each in shown.items()
        ]
        if lines:
            columns = ("gap to ddp, %", *(f"{number} replicas" for number in numbers), "a doubling adds")
            found.append(Table(dict.fromkeys(columns, ""), lines, f"{steps} steps, rounds every 8"))
    return {"long scaling": found}
