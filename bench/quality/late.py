"""What does a whole round's delay cost, and does it cost less in longer runs?
DiLoCo with Muon, its rounds every 8 steps in 2 bits, of which each takes all the steps to the next one; what becomes of
the steps trained meanwhile is each row's. The baseline is no delay. All have the learning rate and outer settings that
one search with one budget has found at the first length, on the first seed, and keep them in longer runs. Takes about
two hours on two cores, half of it for the longest runs; what is made is kept, so that it can be stopped and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from bench.lib.runs import Runs, around, changes, in_words, regime
from bench.lib.search import AXES, WITH_MUON, tune_all
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from bench.quality.length import MUON, finite

NONE = "no delay"
WAYS: dict[str, Settings] = {
    NONE: {},
    "kept": {"merge": "kept"},
    "mixed": {"merge": "mixed"},
    "turned (HeLoCo)": {"merge": "turned"},
    "eager": {"merge": "eager"},
}
"""What becomes of the steps that are trained while a round is on its way."""


@dataclass(frozen=True)
class Options:
    steps: tuple[int, ...] = (800, 3200)
    """Lengths, in inner steps of each replica; the search is at the first."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which rows to make, of which no delay is one."""
    every: int = 8
    """Inner steps between rounds, and of the delay."""
    codec: str = "ef-int2"
    """How exchanges are compressed."""
    method: str = "diloco"
    """What is delayed."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; the search uses the first."""
    budget: int = 6
    """Runs that the search of each row may make."""
    model: str = "micro"
    """What is trained."""
    replicas: int = 8
    """Copies of the model."""

    def of(self, way: str, steps: int) -> Settings:
        """A row's settings before it is tuned."""
        delay = {} if way == NONE else {"delay": self.every}
        rounds: Settings = {"method": self.method, "every": self.every, "codec": self.codec}
        return regime(steps, self.model, self.replicas) | MUON | rounds | WAYS[way] | delay


SMOKE = Options(steps=(4, 8), ways=(NONE, "kept"), every=2, seeds=(0,), budget=1, replicas=2)


def run(options: Options, store: Store) -> Iterator[Part]:
    first = options.steps[0]
    with Runs(store, {}) as runs:
        rows = {name_of(way, options): options.of(way, first) for way in options.ways}
        tune_all(runs, rows, options.budget, options.seeds, AXES, WITH_MUON)
        regimes = [regime(steps, options.model, options.replicas) for steps in options.steps]
        wanted = [store.chosen[name] | each for each in regimes for name in rows]
        started = [future for settings in wanted for future in runs.start_all(settings, options.seeds)]
        for future in started:
            future.result()
    yield from tables(store, options)["late"]


def name_of(way: str, options: Options) -> str:
    """What the store calls a tuned row."""
    return f"{way}, {options.method}, {options.codec}, every {options.every}"


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Losses by length, beside those without a delay on the same seeds."""
    lines = []
    for steps in options.steps:
        found = {way: results for way in options.ways if (results := tuned(store, way, steps, options))}
        for way, results in found.items():
            rounds = f"{mean(one['rounds'] for one in results.values()):.0f}"
            beside = changes(results, found.get(NONE, {}))
            cost = "" if way == NONE or not beside else f"{around(beside, 2, '+')} %"
            losses = around((one["validation_loss"] for one in results.values()), 4)
            settings = store.chosen[name_of(way, options)]
            chosen = {axis.name: settings[axis.name] for axis in AXES}
            lines.append((str(steps), way, losses, cost, rounds, in_words(chosen)))
    columns = ("steps", "steps trained meanwhile", "loss", "to no delay", "rounds", "tuned to")
    return {"late": [Table(dict.fromkeys(columns, ""), lines)]}


def tuned(store: Store, way: str, steps: int, options: Options) -> dict[int, Result]:
    """The results of a row, by seed."""
    settings = store.chosen.get(name_of(way, options), {}) | regime(steps, options.model, options.replicas)
    return finite(store.results(settings))
