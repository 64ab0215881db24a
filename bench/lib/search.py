"""One search for all methods: from the same start, by the same moves, with the same number of runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.lib.runs import Runs
from bench.lib.store import Result, Settings
from farflung.methods import defaults_of

Point = dict[str, float]
Tuned = tuple[Settings, dict[int, Result]]
"""A row's settings with what a search has found, and its results by seed."""


@dataclass(frozen=True)
class Axis:
    """A setting that is searched: by factors, or else by differences, and no further than `least` and `most`."""

    name: str
    step: float
    factor: bool = True
    least: float = 0.0
    most: float = float("inf")

    def moved(self, value: float, by: float) -> float:
        """The value so many steps on, rounded as it is to be written down."""
        further = value * self.step**by if self.factor else value + self.step * by
        return float(f"{min(max(further, self.least), self.most):.3g}")


def compass(loss: Callable[[Point], float], start: Point, axes: list[Axis], budget: int) -> Point:
    """The best point that so many evaluations find.

    Goes along one axis after the other, up, or down where up is no better, as far as it gets better; after a turn
    without any gain, steps are half as long.
    """
    best, least, tried, stride = start, loss(start), {tuple(start.values())}, 1.0
    while True:
        gained = fresh = False
        for axis in axes:
            for direction in (stride, -stride):
                went = False
                while True:
                    point = best | {axis.name: axis.moved(best[axis.name], direction)}
                    if tuple(point.values()) in tried:
                        break
                    if len(tried) >= budget:
                        return best
                    tried.add(tuple(point.values()))
                    fresh, value = True, loss(point)
                    if value >= least:
                        break
                    best, least, went = point, value, True
                gained |= went
                if went:
                    break
        if not gained:
            stride /= 2
        if not fresh and stride < 1 / 8:
            return best


START: Point = {"lr": 6e-3, "weight_decay": 0.1, "outer_momentum": 0.5, "outer_lr": 0.7}
"""Where every search begins."""
WITH_MUON: Point = START | {"lr": 0.024}
"""Where it begins with Muon, which bears more than AdamW."""
OF_INNER = ("lr", "weight_decay")
"""What every method has."""

AXES = (
    Axis("lr", step=2.0),
    Axis("outer_momentum", step=0.2, factor=False, most=0.95),
    Axis("outer_lr", step=1.4),
)


def tune(
    runs: Runs,
    name: str,
    settings: Settings,
    budget: int,
    seed: int,
    along: tuple[Axis, ...] = AXES,
    begin: Point = START,
) -> Settings:
    """A row's settings with what the search finds, of the axes that its method has; notes it."""
    axes = [axis for axis in along if axis.name in OF_INNER or axis.name in defaults_of(settings["method"])]
    start = {axis.name: begin[axis.name] for axis in axes}
    found = compass(lambda point: runs.loss(settings | point, seed), start, axes, budget)
    runs.store.choose(name, settings | found)
    return settings | found


def tune_all(
    runs: Runs,
    rows: dict[str, Settings],
    budget: int,
    seeds: tuple[int, ...],
    along: tuple[Axis, ...] = AXES,
    begin: Point = START,
) -> dict[str, Tuned]:
    """Searches for all rows at once, on the first seed, and runs what was found on all."""

    def row(name: str) -> Tuned:
        found = tune(runs, name, rows[name], budget, seeds[0], along, begin)
        return found, runs.on_seeds(found, seeds)

    with ThreadPoolExecutor(max(1, len(rows))) as threads:
        return dict(zip(rows, threads.map(row, rows), strict=True))
