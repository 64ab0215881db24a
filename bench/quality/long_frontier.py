"""Which methods reach the least loss for their bytes in runs of hundreds of rounds?
The question of frontier with Muon inside and rounds every 8 steps, at two lengths, the baseline ddp. Every row has the
learning rate that one search with one budget has found at the shorter, on the first seed, and keeps it at the longer.
Takes about two hours on two cores with one seed, half of it for the rows that send something in each step, and three
more for those on the frontier with a larger model; what is made is kept, so that it can be stopped and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench.lib.runs import Runs, around, changes, in_words, regime
from bench.lib.search import AXES, START, WITH_MUON, tune
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from bench.quality.frontier import Row, draw_values, on_frontier
from bench.quality.length import MUON, finite, law

EVERY: Settings = {"every": 8}
STREAMING: Settings = {"method": "streaming-diloco", "fragments": 2, "delay": 2, **EVERY}
DILOCOX: Settings = {"method": "dilocox", "codec": "ef-lowrank18-int4", "adapt": False, **EVERY}
NOLOCOX: Settings = {"method": "nolocox", "adapt": False, **EVERY}
ROWS: dict[str, Settings] = {
    "ddp": {"method": "ddp"},
    "diloco": {"method": "diloco", **EVERY},
    "diloco, ef-int2": {"method": "diloco", "codec": "ef-int2", **EVERY},
    "streaming-diloco": STREAMING,
    "streaming-diloco, ef-int2": STREAMING | {"codec": "ef-int2"},
    "decoupled-diloco": {"method": "decoupled-diloco", "fragments": 2, "delay": 2, **EVERY},
    "eager-diloco": {"method": "eager-diloco", **EVERY},
    "dilocox": DILOCOX,
    "dilocox, turned": DILOCOX | {"merge": "turned"},
    "sparseloco": {"method": "sparseloco", **EVERY},
    "des-loc": {"method": "des-loc", **EVERY},
    "noloco": {"method": "noloco", **EVERY},
    "noloco, modulo4": {"method": "noloco", "codec": "modulo4", **EVERY},
    "nolocox": NOLOCOX,
    "nolocox, turned": NOLOCOX | {"merge": "turned"},
    "gasloc": {"method": "gasloc", **EVERY},
    "factored-gossip": {"method": "factored-gossip", **EVERY},
    "gpa": {"method": "gpa", "inner": "gpa", **EVERY},
    "local": {"method": "local"},
    "dynamic-threshold": {"method": "dynamic-threshold"},
    "sparta": {"method": "sparta"},
    "demo": {"method": "demo", "inner": "sign"},
}
"""All rows; those that have a round in each step come last, since they take three times as long."""
BEST = (
    "ddp",
    "des-loc",
    "diloco",
    "streaming-diloco",
    "streaming-diloco, ef-int2",
    "diloco, ef-int2",
    "noloco, modulo4",
    "nolocox",
    "local",
)
"""Those on the frontier of the longest runs, and the nearest to it."""
CLAIMS = (("dilocox", "diloco", 1.0), ("noloco", "diloco", 1.0), ("nolocox", "noloco", 2.0))
"""Which row is said to come within so many per cent of which other one."""


@dataclass(frozen=True)
class Options:
    steps: tuple[int, ...] = (800, 3200)
    """Lengths, in inner steps of each replica; the search is at the first."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which to make."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; the search uses the first."""
    budget: int = 3
    """Runs that the search of each row may make."""
    model: str = "micro"
    """What is trained."""
    larger: tuple[str, ...] = ("tiny",)
    """Models on which the best rows are made, too, with the settings found."""
    replicas: int = 8
    """Copies of the model."""

    def on(self, model: str) -> Options:
        """The best rows, on a larger model."""
        return replace(self, model=model, rows=tuple(name for name in self.rows if name in BEST))

    def at(self, steps: int) -> Settings:
        """What all rows of a length have in common."""
        return regime(steps, self.model, self.replicas)


SMOKE = Options(steps=(8, 16), rows=("ddp", "diloco", "noloco"), seeds=(0,), budget=1, larger=(), replicas=2)


def run(options: Options, store: Store) -> Iterator[Part]:
    def row(name: str) -> list[Future[Result]]:
        settings = options.at(options.steps[0]) | MUON | ROWS[name]
        begin = WITH_MUON if settings["inner"] == "muon" else START
        found = tune(runs, name, settings, options.budget, options.seeds[0], AXES[:1], begin)
        return [
            future for steps in options.steps for future in runs.start_all(found | options.at(steps), options.seeds)
        ]

    with Runs(store, {}) as runs, ThreadPoolExecutor(len(options.rows)) as threads:
        for future in [future for futures in threads.map(row, options.rows) for future in futures]:
            future.result()
        larger = [(options.on(model), steps) for model in options.larger for steps in options.steps]
        wanted = [store.chosen[name] | one.at(steps) for one, steps in larger for name in one.rows]
        for future in [future for settings in wanted for future in runs.start_all(settings, options.seeds)]:
            future.result()
    for parts in tables(store, options).values():
        yield from parts


def rows_of(store: Store, options: Options, steps: int) -> dict[str, Row]:
    """The rows of a length that there are, by name."""
    settings = {name: store.chosen[name] | options.at(steps) for name in options.rows if name in store.chosen}
    found = {name: Row(name, every, finite(store.results(every))) for name, every in settings.items()}
    return {name: row for name, row in found.items() if row.results}


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Loss against bytes at each length, and how far those are from each other that are said to be level."""
    found = {steps: rows for steps in options.steps if (rows := rows_of(store, options, steps))}
    larger: list[Part] = [
        by_bytes(f"{model}, {steps} steps", rows)
        for model in options.larger
        for steps in options.steps
        if (rows := rows_of(store, options.on(model), steps))
    ]
    return {
        "long frontier": [by_bytes(f"{steps} steps", rows) for steps, rows in found.items()],
        **({"long frontier, larger": larger} if larger else {}),
        "long claims": [by_claim(found)],
    }


def gaps_of(rows: dict[str, Row]) -> dict[str, list[float]]:
    """By how many per cent each is above ddp, seed by seed, so that rows of different seeds can be compared."""
    ddp = rows["ddp"].results if "ddp" in rows else {}
    return {name: gaps for name, row in rows.items() if (gaps := changes(row.results, ddp))}


def by_bytes(title: str, rows: dict[str, Row]) -> Table:
    gaps = gaps_of(rows)
    best = on_frontier(gaps, {name: row.megabytes for name, row in rows.items()})
    columns = ("method", "loss", "to ddp", "rounds", "MB a replica", "fewer than ddp", "on the frontier", "tuned to")

    def line(row: Row) -> tuple[str, ...]:
        gap = f"{around(gaps[row.name], 2, '+')} %" if row.name in gaps and row.name != "ddp" else ""
        return (
            row.name,
            around(row.losses, 4),
            gap,
            f"{mean(one['rounds'] for one in row.results.values()):.0f}",
            f"{row.megabytes:.3g}",
            row.times_fewer,
            "yes" if row.name in best else "",
            in_words({"lr": row.settings["lr"]}),
        )

    return Table(dict.fromkeys(columns, ""), map(line, rows.values()), title)


def by_claim(found: dict[int, dict[str, Row]]) -> Table:
    """How far each is from the one that it is said to come near, by length; and the steps to there, by a power law."""
    columns = (
        "",
        "beside",
        *(f"{steps} steps" for steps in found),
        "fewer bytes than that",
        "said",
        "law",
        "steps to that",
    )
    lines = []
    for name, beside, within in CLAIMS:
        pairs = {steps: (rows[name], rows[beside]) for steps, rows in found.items() if {name, beside} <= rows.keys()}
        gaps = {steps: changes(one.results, other.results) for steps, (one, other) in pairs.items()}
        if not all(gaps.values()) or not gaps:
            continue
        one, other = pairs[max(pairs)]
        fitted = law(name, [(steps, mean(each)) for steps, each in gaps.items()], within)
        cells = (f"{around(gaps[steps], 2, '+')} %" if steps in gaps else "" for steps in found)
        fewer = f"{other.megabytes / one.megabytes:.3g}×"
        lines.append((name, beside, *cells, fewer, f"{within:g} %", *(fitted[1:] if fitted else ("", ""))))
    return Table(dict.fromkeys(columns, ""), lines)


def plots(store: Store) -> dict[str, Any]:
    """The rows of the longest runs as a picture."""
    return {"long": partial(draw, store)}


def draw(store: Store, path: Path) -> None:
    options = Options()
    rows = rows_of(store, options, options.steps[-1])
    draw_values(gaps_of(rows), {name: row.megabytes for name, row in rows.items()}, "loss above ddp's, %", path)
