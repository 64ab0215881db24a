"""Do settings that were found on a small model serve larger ones, and do methods rank there as they did?
The rows of frontier with what it has tuned on its model, on larger models, as they are; the baseline is their own loss
and rank there. Takes about a quarter of an hour with tiny and an hour with small (10M parameters) on two cores, after
frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from statistics import correlation, mean

from bench.lib.runs import Runs, regime
from bench.lib.store import Result, Store
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
    tuned = Store("frontier")
    losses = {frontier.Options.model: {name: _loss(tuned, name, options) for name in options.rows}}
    with Runs(store, {}) as runs:
        started = {
            (model, name): runs.start_all(
                regime(options.steps, model, options.replicas) | tuned.chosen_as(name), options.seeds
            )
            for model in options.models
            for name in options.rows
        }
        for model in options.models:
            losses[f"{model} as tuned"] = {
                name: _mean([future.result() for future in started[model, name]]) for name in options.rows
            }
    places = {model: ranks(each) for model, each in losses.items()}
    columns, lines = {"method": ""}, [list[Cell]([name]) for name in options.rows]
    for model in losses:
        columns |= {model: ".4f", f"{model}, rank": ".0f"}
        for name, line in zip(options.rows, lines, strict=True):
            line += [losses[model][name], places[model][name]]
    yield Table(columns, lines, f"{options.replicas} replicas, {options.steps} steps")
    base, *larger = places.values()
    for model, theirs in zip(options.models, larger, strict=True):
        yield f"{model}: correlation of ranks {correlation(list(base.values()), list(theirs.values())):.2f}"


def ranks(losses: Mapping[str, float]) -> dict[str, float]:
    """The place of each, from 1 for the least."""
    order = sorted(losses, key=lambda name: losses[name])
    return {name: float(order.index(name) + 1) for name in losses}


def _loss(tuned: Store, name: str, options: Options) -> float:
    """What frontier has reached with a row."""
    settings = frontier.Options().regime | tuned.chosen_as(name)
    return _mean([one for seed, one in tuned.results(settings).items() if seed in options.seeds])


def _mean(results: list[Result]) -> float:
    """Of the losses; infinite where one has diverged."""
    return mean(inf if one["validation_loss"] is None else one["validation_loss"] for one in results)
