"""Which methods reach the least loss for their bytes?
Eight replicas, all methods with learning rates that one search with one budget has found on the first seed; the
baseline is ddp, and a row is on the frontier when no other beats it in both loss and cost. Takes some hours on two
cores; first, since other benches begin from what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.lib.runs import Runs, around, in_words, regime
from bench.lib.search import tune_all
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from farflung import settings as run_settings
from farflung.networks import Conditions
from farflung.outer import message_bytes
from farflung.planner.architecture import architecture_of
from farflung.planner.timing import Timer

WITH_ADAMW: dict[str, Settings] = {
    "ddp": {"method": "ddp"},
    "dynamic-threshold": {"method": "dynamic-threshold"},
    "diloco, every 5": {"method": "diloco", "every": 5},
    "diloco, every 20": {"method": "diloco", "every": 20},
    "streaming-diloco, every 20": {"method": "streaming-diloco", "every": 20, "fragments": 2, "delay": 2},
    "eager-diloco, every 20": {"method": "eager-diloco", "every": 20},
    "dilocox, every 20": {"method": "dilocox", "every": 20, "codec": "ef-lowrank18-int4", "adapt": False},
    "sparseloco, every 5": {"method": "sparseloco", "every": 5},
    "noloco, every 5": {"method": "noloco", "every": 5},
    "noloco, every 20": {"method": "noloco", "every": 20},
    "noloco, every 5, modulo4": {"method": "noloco", "every": 5, "codec": "modulo4"},
    "nolocox, every 20": {"method": "nolocox", "every": 20, "adapt": False},
    "local": {"method": "local"},
}

ROWS: dict[str, Settings] = {
    **{name: {**settings, "inner": "adamw"} for name, settings in WITH_ADAMW.items()},
    "demo": {"method": "demo", "inner": "sign"},
}
"""All rows, with the inner optimizers that the methods were published with."""


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    model: str = "micro"
    """What is trained."""
    replicas: int = 8
    """Copies of the model."""
    budget: int = 6
    """Runs that the search of each row may make."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each tuned row for each; the search uses the first."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Which rows to make."""

    @property
    def regime(self) -> Settings:
        """What all rows have in common."""
        return regime(self.steps, self.model, self.replicas)


SMOKE = Options(steps=2, replicas=2, budget=1, seeds=(0,), rows=("ddp", "diloco, every 5"))


def run(options: Options, store: Store) -> list[Part]:
    with Runs(store, options.regime) as runs:
        tune_all(runs, {name: ROWS[name] for name in options.rows}, options.budget, options.seeds)
    return [part for parts in tables(store, options).values() for part in parts]


@dataclass(frozen=True)
class Row:
    """One method, tuned."""

    name: str
    settings: Settings
    results: dict[int, Result]

    @property
    def losses(self) -> list[float]:
        """By seed."""
        return [self.results[seed]["validation_loss"] for seed in sorted(self.results)]

    @property
    def megabytes(self) -> float:
        """That one replica sent, a mean."""
        return float(mean(r["bytes_sent"] for r in self.results.values()) / self.settings["replicas"] / 1e6)

    @property
    def fewer(self) -> float:
        """How many times fewer bytes than float32 gradients every step would have been."""
        return mean(r["ddp_bytes"] / r["bytes_sent"] if r["bytes_sent"] else math.inf for r in self.results.values())

    @property
    def times_fewer(self) -> str:
        """The same in a table."""
        return f"{self.fewer:.3g}×" if math.isfinite(self.fewer) else "∞"


def rows_of(store: Store, options: Options) -> list[Row]:
    """All rows of the frontier that there are."""
    settings = {name: options.regime | store.chosen[name] for name in ROWS if name in store.chosen}
    return [Row(name, every, store.results(every)) for name, every in settings.items()]


Values = Mapping[str, Sequence[float]]
"""What is to be low, by row, then by seed: losses, or gaps."""


def losses_of(rows: Sequence[Row]) -> Values:
    """Each row's losses."""
    return {row.name: row.losses for row in rows}


def on_frontier(values: Values, cost: Mapping[str, float]) -> set[str]:
    """The rows that no other row beats in both a mean value and cost."""
    means = {name: mean(each) for name, each in values.items()}
    return {
        name
        for name in means
        if not any(means[other] < means[name] and cost[other] <= cost[name] for other in means if other != name)
    }


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Loss against bytes, and against hours."""
    rows = rows_of(store, options)
    return {"frontier": [by_bytes(rows)], "hours": [by_hours(rows)]} if rows else {}


def by_bytes(rows: list[Row]) -> Table:
    best = on_frontier(losses_of(rows), {row.name: row.megabytes for row in rows})
    searched = ("lr", "outer_lr", "outer_momentum")
    columns = ("method", "loss", "seed by seed", "MB a replica", "fewer than ddp", "on the frontier", "tuned to")
    return Table(
        dict.fromkeys(columns, ""),
        [
            (
                row.name,
                around(row.losses),
                " ".join(f"{loss:.3f}" for loss in row.losses),
                f"{row.megabytes:.3g}",
                row.times_fewer,
                "yes" if row.name in best else "",
                in_words({key: row.settings[key] for key in searched if key in row.settings}),
            )
            for row in rows
        ],
    )


RATES = (10, 100, 1000)
"""Links, in Mbit/s, that hours are told for."""

CONDITIONS = Conditions(latency_ms=20, step_ms=100)
"""Of the simulated hours, but for the links' rates."""


def seconds_of(settings: Settings, rate: float) -> float:
    """What a run takes on the simulated clock with links of this rate; trains nothing."""
    config = run_settings.Settings.of(**settings)
    method = config.method()
    if not method.schedule.every:
        return config.run.steps * CONDITIONS.step_ms / 1000
    conditions = Conditions(latency_ms=CONDITIONS.latency_ms, step_ms=CONDITIONS.step_ms, bandwidth_mbps=rate)
    cells = architecture_of(config.workload.model, config.workload.sequence_length).cells
    sizes = cache(partial(message_bytes, method, cells))
    rounds = max(1, config.run.steps // method.schedule.every)
    timing = Timer(method, sizes, conditions, config.run.replicas, rounds, math.inf).run()
    return timing.seconds * config.run.steps / timing.steps


def by_hours(rows: list[Row]) -> Table:
    cost = {rate: {row.name: seconds_of(row.settings, rate) for row in rows} for rate in RATES}
    best = {rate: on_frontier(losses_of(rows), cost[rate]) for rate in RATES}

    def hours(row: Row, rate: int) -> str:
        return f"{cost[rate][row.name] / 3600:.4f}" + (" (frontier)" if row.name in best[rate] else "")

    columns = ("method", "loss", *(f"h at {rate} Mbit/s" for rate in RATES))
    cells = [(row.name, around(row.losses), *(hours(row, rate) for rate in RATES)) for row in rows]
    return Table(dict.fromkeys(columns, ""), cells)


def plots(store: Store) -> dict[str, Any]:
    """The two tables as pictures, each by what draws it into a file."""
    return {"frontier": partial(draw_bytes, store), "hours": partial(draw_hours, store)}


def scatter(axes: Any, values: Values, cost: Mapping[str, float]) -> None:
    """Values against a cost: deviations as bars, the frontier as a line; a row without cost is a line, too."""
    from bench.lib.plots import MARKERS

    best, means = on_frontier(values, cost), {name: mean(each) for name, each in values.items()}
    steps = sorted((cost[name], means[name]) for name in best if cost[name])
    axes.step(*zip(*steps, strict=True), where="post", color="0.6", linewidth=1, zorder=0)
    for number, (name, each) in enumerate(values.items()):
        if not cost[name]:
            axes.axhline(means[name], color="0.4", linestyle=":")
            axes.text(1, means[name], f"{name}, 0 ", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
            continue
        axes.errorbar(
            cost[name],
            means[name],
            yerr=stdev(each) if len(each) > 1 else 0,
            fmt=MARKERS[number % len(MARKERS)],
            color=f"C{number}",
            markerfacecolor=f"C{number}" if name in best else "white",
            label=name,
        )
    axes.grid(alpha=0.3)


LOSS = "validation loss, nats a token"


def draw_bytes(store: Store, path: Path) -> None:
    rows = rows_of(store, Options())
    draw_values(losses_of(rows), {row.name: row.megabytes for row in rows}, LOSS, path)


def draw_values(values: Values, megabytes: Mapping[str, float], label: str, path: Path) -> None:
    """Values against bytes as a picture."""
    from bench.lib.plots import name_points, plt, save

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    scatter(axes, values, megabytes)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB that one replica sent (filled: on the frontier; dotted: sent nothing)")
    axes.set_ylabel(label)
    name_points(axes, {name: (megabytes[name], mean(each)) for name, each in values.items() if megabytes[name]})
    save(figure, path)


def draw_hours(store: Store, path: Path) -> None:
    from bench.lib.plots import plt, save

    rows = rows_of(store, Options())
    figure, places = plt.subplots(2, 2, figsize=(9, 8), layout="constrained")
    *several, corner = places.flat
    for axes, rate in zip(several, RATES, strict=True):
        scatter(axes, losses_of(rows), {row.name: seconds_of(row.settings, rate) / 3600 for row in rows})
        axes.set_title(f"links of {rate} Mbit/s")
        axes.set_xlabel("simulated hours")
        axes.set_ylabel(LOSS)
    corner.axis("off")
    corner.legend(*several[0].get_legend_handles_labels(), title="filled: on the frontier", loc="center")
    save(figure, path)
