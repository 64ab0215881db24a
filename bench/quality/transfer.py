"""Do settings that were found on a small model serve larger ones, and do methods rank there as they did?
The rows of frontier with what it has tuned on its model, on larger models, as they are; the baseline is their own loss
and rank there. Takes about a quarter of an hour with tiny and an hour with small (10M parameters) on two cores, after
frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, nan
from statistics import correlation, mean

from bench.lib.runs import Runs, regime
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.quality import frontier


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("tiny", "small")
    """On which models."""
    steps: int = 200
    """Inner steps of each replica."""
    replicas: int = 8
    """Copies of the model."""
    seeds: tuple[int, ...] = (0,)
    """One run of each row for each."""
    rows: tuple[str, ...] = tuple(frontier.ROWS)
    """Which rows to make."""


SMOKE = Options(models=("micro",), steps=2, replicas=2, rows=("ddp", "diloco, every 5"))


def run(options: Options, store: Store) -> Iterator[Part]:
    with Runs(store, {}) as runs:
        rows = [settings_of(name, model, options) for model in options.models for name in options.rows]
        for future in [future for settings in rows for future in runs.start_all(settings, options.seeds)]:
            future.result()
    for parts in tables(store, options).values():
        yield from parts


def settings_of(name: str, model: str, options: Options) -> Settings:
    """A row as frontier has tuned it, on another model."""
    return regime(options.steps, model, options.replicas) | Store("frontier").chosen_as(name)


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Losses and ranks on the model that rows were tuned on, and on larger ones, of what was made there."""
    tuned, base = Store("frontier"), frontier.Options().regime
    found = {frontier.Options.model: {name: tuned.results(base | tuned.chosen_as(name)) for name in options.rows}}
    for model in options.models:
        results = {name: store.results(settings_of(name, model, options)) for name in options.rows}
        if any(results.values()):
            found[f"{model} as tuned"] = {name: each for name, each in results.items() if each}
    losses = {model: {name: _loss(each, options) for name, each in rows.items()} for model, rows in found.items()}
    places = {model: ranks(each) for model, each in losses.items()}
    columns, lines = {"method": ""}, [list[Cell]([name]) for name in options.rows]
    for model in losses:
        columns |= {model: ".4f", f"{model}, rank": ".0f"}
        for name, line in zip(options.rows, lines, strict=True):
            line += [losses[model].get(name), places[model].get(name)]
    first, *larger = losses
    alike = [(model, len(losses[model]), spearman(losses[first], losses[model])) for model in larger]
    return {
        "transfer": [Table(columns, lines, f"{options.replicas} replicas, {options.steps} steps")],
        "transfer ranks": [Table({"": "", "rows": "d", f"correlation with the ranks on {first}": ".2f"}, alike)],
    }


def ranks(losses: Mapping[str, float]) -> dict[str, float]:
    """The place of each, from 1 for the least."""
    order = sorted(losses, key=lambda name: losses[name])
    return {name: float(order.index(name) + 1) for name in losses}


def spearman(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """How alike two rank the rows that both have: 1 for the same, -1 for the reverse, nan for fewer than two rows."""
    both = one.keys() & other.keys()
    first, second = (ranks({name: losses[name] for name in both}) for losses in (one, other))
    return correlation([first[name] for name in both], [second[name] for name in both]) if len(both) > 1 else nan


def _loss(results: dict[int, Result], options: Options) -> float:
    """The mean over the seeds; infinite where one has diverged."""
    return mean(one["validation_loss"] or inf for seed, one in results.items() if seed in options.seeds)
