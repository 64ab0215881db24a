"""How does the gap to synchronous training grow with the number of replicas?
With the settings that frontier has found at 8 replicas, a fixed batch per replica or a fixed global batch, the
baseline is ddp with as many replicas; a line through the gaps says what they would be at 256. Takes some hours on two
cores, after frontier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.runs import Runs, around, changes, regime
from bench.lib.store import Settings, Store
from bench.lib.table import Part, Table


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1)
    """One run of each row for each."""
    replicas: tuple[int, ...] = (4, 8, 16, 32)
    """Copies of the model."""


SMOKE = Options(steps=2, seeds=(0,), replicas=(2,))


METHODS = ("ddp", "diloco, every 20", "noloco, every 20")
BATCH = 8
"""Sequences in a step of one of 8 replicas."""
BATCHES: dict[str, Callable[[int], int]] = {
    "fixed batch per replica": lambda replicas: BATCH,
    "fixed global batch": lambda replicas: 8 * BATCH // replicas,
}


def settings_of(tuned: Settings, batch: str, replicas: int) -> Settings:
    """A row's settings."""
    return {**tuned, "replicas": replicas, "batch_size": BATCHES[batch](replicas)}


def run(options: Options, store: Store) -> list[Part]:
    frontier = Store("frontier")
    with Runs(store, regime(options.steps)) as runs:
        futures = [
            runs.start(settings_of(frontier.chosen_as(method), batch, replicas), seed)
            for seed in options.seeds
            for replicas in options.replicas
            for batch in BATCHES
            for method in METHODS
        ]
        for future in futures:
            future.result()
    return [part for parts in tables(store, options).values() for part in parts]


@dataclass(frozen=True)
class Gaps:
    """A method's gaps to ddp, in per cent, by replicas and seed."""

    batch: str
    method: str
    points: list[tuple[int, float]]

    def at(self, replicas: int) -> list[float]:
        """By seed."""
        return [gap for number, gap in self.points if number == replicas]

    def line(self, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
        """Gap = first + second · log2(replicas), by least squares."""
        numbers, values = zip(*points, strict=True)
        slope, start = np.polyfit(np.log2(numbers), values, 1)
        return float(start), float(slope)

    def predicted(self, replicas: int, tries: int = 2000) -> tuple[float, float, float]:
        """The gap at so many replicas: the line's, and 5th and 95th percentile of lines through resampled points."""
        start, slope = self.line(self.points)
        chance, found = np.random.default_rng(0), list[float]()
        while len(found) < tries:
            points = [self.points[i] for i in chance.integers(len(self.points), size=len(self.points))]
            if len({number for number, _ in points}) > 1:
                first, second = self.line(points)
                found.append(first + second * math.log2(replicas))
        low, high = np.percentile(found, [5, 95])
        return start + slope * math.log2(replicas), float(low), float(high)


def all_gaps(store: Store, options: Options) -> list[Gaps]:
    """Every method's but ddp's, for both kinds of batch."""
    tuned, common = Store("frontier").chosen, regime(options.steps)
    found = []
    for batch in BATCHES:
        for method in METHODS[1:]:
            points = []
            for replicas in options.replicas:
                own, ddp = (
                    store.results(common | settings_of(tuned[name], batch, replicas)) for name in (method, METHODS[0])
                )
                points += [(replicas, change) for change in changes(own, ddp)]
            found.append(Gaps(batch, method, points))
    return found


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """The gaps, and lines through them."""
    every = all_gaps(store, options)
    columns = ("gap to ddp, %", *(f"{number} replicas" for number in options.replicas))
    rows = [
        (f"{gaps.method}, {gaps.batch}", *(around(gaps.at(n), 1, "+") if gaps.at(n) else "" for n in options.replicas))
        for gaps in every
    ]
    heads = ("", "fit, %", "at 256 replicas", "5th to 95th percentile")
    fits = [fit(gaps) for gaps in every if len(gaps.points) > 2]
    return {
        "scaling": [Table(dict.fromkeys(columns, ""), rows)],
        "scaling fits": [Table(dict.fromkeys(heads, ""), fits)],
    }


def fit(gaps: Gaps) -> tuple[str, ...]:
    """What the line through a method's gaps says."""
    start, slope = gaps.line(gaps.points)
    guess, low, high = gaps.predicted(256)
    line = f"{start:.1f} {slope:+.1f} · log2 N"
    return f"{gaps.method}, {gaps.batch}", line, f"{guess:.1f} %", f"{low:.1f} to {high:.1f} %"


def plots(store: Store) -> dict[str, Any]:
    """The lines as a picture."""
    return {"scaling": partial(draw, store)}


def draw(store: Store, path: Path) -> None:
    from bench.lib.plots import plt, save

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    shown = [gaps for gaps in all_gaps(store, Options()) if len(gaps.points) > 2]
    for number, gaps in enumerate(shown):
        beside = 2 ** (0.06 * (number - (len(shown) - 1) / 2))  # so that no row's points hide another's
        replicas, found = zip(*gaps.points, strict=True)
        style: dict[str, Any] = {"color": f"C{number}", "marker": "osD^"[number % 4]}
        axes.plot([n * beside for n in replicas], found, linestyle="", label=f"{gaps.method}, {gaps.batch}", **style)
        start, slope = gaps.line(gaps.points)
        ends = (min(replicas), 256)
        axes.plot(ends, [start + slope * math.log2(n) for n in ends], "--", color=style["color"], linewidth=1)
        guess, low, high = gaps.predicted(256)
        axes.errorbar(256 * beside, guess, yerr=[[guess - low], [high - guess]], capsize=4, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("replicas (a point for each seed; at 256 the lines' ends, 5th to 95th percentile)")
    axes.set_ylabel("gap to ddp, % of its loss")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
