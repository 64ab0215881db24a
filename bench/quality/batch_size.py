"""Does training with few rounds bear larger batches than synchronous training?
The same tokens in batches 1, 2, 4 and 8 times as large, and so in fewer steps. The baseline is ddp, of which each
optimizer's rows are told beside its loss at the smallest batch; learning rates are of one search with one budget for
each row and batch. Takes about an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from bench.lib.runs import Runs, around, changes, in_words, regime, sound
from bench.lib.search import AXES, START, WITH_MUON, tune_all
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table

WAYS: dict[str, Settings] = {
    "ddp, AdamW": {"method": "ddp", "inner": "adamw"},
    "ddp, Muon": {"method": "ddp", "inner": "muon"},
    "diloco, AdamW": {"method": "diloco", "inner": "adamw"},
    "diloco, Muon": {"method": "diloco", "inner": "muon"},
    "noloco, Muon": {"method": "noloco", "inner": "muon"},
}
BATCH = 8
"""Sequences in a step of a replica, at the smallest."""

Key = tuple[str, int]


@dataclass(frozen=True)
class Options:
    steps: int = 800
    """Inner steps of each replica with the smallest batch."""
    factors: tuple[int, ...] = (1, 2, 4, 8)
    """How many times as large batches are."""
    every: int = 5
    """Inner steps between rounds, for all batches."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; the search uses the first."""
    budget: int = 4
    """Runs that the search of each learning rate may make."""
    model: str = "micro"
    """What is trained."""
    replicas: int = 8
    """Copies of the model."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which rows to make."""

    @property
    def keys(self) -> list[Key]:
        """All rows."""
        return list(product(self.ways, self.factors))

    def of(self, way: str, factor: int) -> Settings:
        """A row's settings before it is tuned; it warms up over as many tokens as with the smallest batch."""
        steps = self.steps // factor
        rounds = {} if WAYS[way]["method"] == "ddp" else {"every": self.every}
        larger = {"batch_size": BATCH * factor, "warmup": max(1, self.steps // 20 // factor)}
        return regime(steps, self.model, self.replicas) | WAYS[way] | rounds | larger


SMOKE = Options(steps=8, factors=(1, 2), every=2, seeds=(0,), budget=1, replicas=2, ways=("ddp, Muon", "diloco, Muon"))


def run(options: Options, store: Store) -> Iterator[Part]:
    with Runs(store, {}) as runs:
        for inner, begin in (("adamw", START), ("muon", WITH_MUON)):
            keys = [(way, factor) for way, factor in options.keys if WAYS[way]["inner"] == inner]
            rows = {name_of(*key, options): options.of(*key) for key in keys}
            tune_all(runs, rows, options.budget, options.seeds, AXES[:1], begin)
    yield from tables(store, options)["batch size"]


def name_of(way: str, factor: int, options: Options) -> str:
    """What the store calls a tuned row."""
    return f"{way}, {factor} times the batch, {options.steps} steps"


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Losses by batch, beside each way's smallest batch, and beside ddp with the same optimizer and batch."""
    chosen = {key: store.chosen[name] for key in options.keys if (name := name_of(*key, options)) in store.chosen}
    found = {key: sound(store.results(settings)) for key, settings in chosen.items()}
    columns = ("", "batch", "loss", "to its smallest", "to ddp", "tuned to")
    title = f"{options.replicas} replicas, the tokens of {options.steps} steps of {BATCH} sequences each"
    lines = [line(key, found, chosen[key], options) for key in found if found[key]]
    return {"batch size": [Table(dict.fromkeys(columns, ""), lines, title)]}


def line(key: Key, found: dict[Key, dict[int, Result]], settings: Settings, options: Options) -> tuple[Cell, ...]:
    """A row; what it is to stand beside may not be there yet."""
    way, factor = key
    beside = [(way, options.factors[0]), (f"ddp, {way.partition(', ')[2]}", factor)]
    own, apart = found[key], [changes(found[key], found.get(other, {})) for other in beside]
    gaps = [f"{around(each, 1, '+')} %" if each else "" for each in apart]
    losses = around((one["validation_loss"] for one in own.values()), 4)
    return way, str(BATCH * factor), losses, *gaps, in_words({"lr": settings["lr"]})
