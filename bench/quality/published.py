"""Is NoLoCo better than DiLoCo at equal steps, as its paper says?
Both with the outer settings that it names, AdamW, a warm-up of a twenty-fifth and a cosine to a tenth; rounds every 50
and 100 steps, from few rounds to as many as there are in the paper. The baseline is ddp. Each row has the learning rate
that one search with one budget has found at the shortest length, on the first seed, and keeps it at the longer ones.
Takes about three hours on two cores for three seeds, nearly all of it for 250 rounds; what is made is kept, so that it
can be stopped and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import mean

from bench.lib.runs import Runs, around, changes, in_words, regime, sound
from bench.lib.search import AXES, tune_all
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.quality.frontier import Row

NOLOCO: Settings = {"method": "noloco", "outer_lr": 0.7, "outer_momentum": 0.5}
DILOCO: Settings = {"method": "diloco", "outer_lr": 0.7}
WAYS: dict[str, Settings] = {
    "ddp": {"method": "ddp"},
    "diloco, every 50": DILOCO | {"every": 50, "outer_momentum": 0.5},
    "diloco, every 100": DILOCO | {"every": 100, "outer_momentum": 0.5},
    "diloco, every 100, momentum 0.9": DILOCO | {"every": 100, "outer_momentum": 0.9},
    "noloco, every 50": NOLOCO | {"every": 50},
    "noloco, every 100": NOLOCO | {"every": 100},
}
"""Momentum 0.9 is that of DiLoCo's own paper."""
EVERY = 50
"""Steps of what is called a round in lengths."""


@dataclass(frozen=True)
class Options:
    rounds: tuple[int, ...] = (16, 64, 250)
    """Lengths: so many times 50 steps."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; the search uses the first."""
    budget: int = 5
    """Runs that the search of each learning rate may make."""
    model: str = "micro"
    """What is trained."""
    replicas: int = 8
    """Copies of the model."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which rows to make."""

    def of(self, way: str, rounds: int) -> Settings:
        """A row's settings before it is tuned."""
        steps = rounds * EVERY
        return regime(steps, self.model, self.replicas) | {"inner": "adamw", "warmup": steps // 25} | WAYS[way]


SMOKE = Options(rounds=(2, 4), seeds=(0,), budget=1, replicas=2, ways=("diloco, every 50", "noloco, every 50"))


def run(options: Options, store: Store) -> Iterator[Part]:
    with Runs(store, {}) as runs:
        first, *longer = sorted(options.rounds)
        rows = {name_of(way, first): options.of(way, first) for way in options.ways}
        tuned = tune_all(runs, rows, options.budget, options.seeds, AXES[:1])
        started = []
        for rounds, way in product(longer, options.ways):
            settings = tuned[name_of(way, first)][0] | options.of(way, rounds)
            store.choose(name_of(way, rounds), settings)
            started += runs.start_all(settings, options.seeds)
        for future in started:
            future.result()
    yield from tables(store, options)["published"]


def name_of(way: str, rounds: int) -> str:
    """What the store calls a tuned row."""
    return f"{way}, {rounds} rounds"


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """The rows of each length, beside DiLoCo's with as many rounds as NoLoCo's."""
    columns = ("steps", "method", "loss", "to diloco, every 50", "MB a replica", "replicas apart", "tuned to")
    rows = [row for rounds in sorted(options.rounds) for row in _of_length(store, options, rounds)]
    return {"published": [Table(dict.fromkeys(columns, ""), rows, f"{options.replicas} replicas")]}


def _of_length(store: Store, options: Options, rounds: int) -> list[tuple[Cell, ...]]:
    chosen = {way: store.chosen[name_of(way, rounds)] for way in options.ways if name_of(way, rounds) in store.chosen}
    found = {way: sound(store.results(settings)) for way, settings in chosen.items()}
    return [(f"{rounds * EVERY}", *line(way, found, chosen[way])) for way, results in found.items() if results]


def line(way: str, found: dict[str, dict[int, Result]], settings: Settings) -> tuple[Cell, ...]:
    """A row; what it is to stand beside may not be there yet."""
    own, beside = found[way], changes(found[way], found.get("diloco, every 50", {}))
    losses = around((one["validation_loss"] for one in own.values()), 4)
    apart = f"{mean(one.get('weight_spread') or 0 for one in own.values()):.4f}"
    change = f"{around(beside, 2, '+')} %" if beside else ""
    return way, losses, change, f"{Row(way, settings, own).megabytes:.3g}", apart, in_words({"lr": settings["lr"]})
