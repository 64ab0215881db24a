"""What closes the gap to synchronous training, at a hundredth of its bytes?
Begins with ddp, the baseline, and DiLoCo as published, adds one thing at a time, and keeps of each step's
alternatives the best on the first seed, if it is better than without; all rows but ddp's send about a hundredth of
ddp's bytes. Takes some hours on two cores.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import mean

from bench.lib.runs import Runs, around, changes, in_words, regime
from bench.lib.search import AXES, tune
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from bench.quality.frontier import Row


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; what is better is decided on the first."""
    budget: int = 4
    """Runs that the search of each learning rate may make."""
    replicas: int = 8
    """Copies of the model."""
    steps_of_search: int = 8
    """How many of the things that might close the gap to add, one after the other."""
    regimes: int = 4
    """In how many other regimes to put the best beside ddp."""


SMOKE = Options(steps=2, seeds=(0,), budget=1, replicas=2, steps_of_search=1, regimes=0)


PUBLISHED_ROW = "DiLoCo as published"

PUBLISHED: Settings = {
    "method": "diloco",
    "inner": "adamw",
    "every": 51,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "codec": "bfloat16",
}
"""At half the bytes a value, 51 steps between rounds are a hundredth of ddp's bytes."""

STEPS: dict[str, dict[str, Settings]] = {
    "outer learning rate and momentum": {
        f"{lr:g}, {momentum:g}": {"outer_lr": lr, "outer_momentum": momentum}
        for lr, momentum in ((0.7, 0.5), (0.7, 0.3), (1.0, 0.0), (1.4, 0.0))
    },
    "Muon, and its learning rate": {
        f"Muon, {factor:g} times the rate": {"inner": "muon", "lr": factor} for factor in (2.0, 4.0, 8.0)
    },
    "codec and every, at the same bytes": {
        "int4 with error feedback, every 14": {"codec": "ef-int4", "every": 14},
        "int2 with error feedback, every 8": {"codec": "ef-int2", "every": 8},
    },
    "inner learning rate": {"twice": {"lr": 2.0}, "half": {"lr": 0.5}},
    "outer learning rate and momentum, again": {
        f"{lr:g}, {momentum:g}": {"outer_lr": lr, "outer_momentum": momentum}
        for lr, momentum in ((1.0, 0.0), (1.4, 0.0), (2.0, 0.0), (1.0, 0.3))
    },
    "rounds that grow rarer, or more frequent": {
        "rarer": {"every": 0.5, "every_final": 2.0},
        "more frequent": {"every": 2.0, "every_final": 0.5},
    },
    "learning-rate schedule": {
        "a line to nothing": {"lr_schedule": "linear", "lr_final": 0.0},
        "stable, then a line to nothing": {"lr_schedule": "stable", "lr_final": 0.0},
    },
    "late average": {"the last tenth": {"tail_average": 0.1}, "the last quarter": {"tail_average": 0.25}},
}
"""What is added, and its alternatives; for lr and every, factors."""

LONG: Settings = {"steps": 800, "eval_every": 800, "log_every": 800}

REGIMES: dict[str, tuple[Settings, int]] = {
    "as above": ({}, 3),
    "four times the batch": ({"batch_size": 32}, 1),
    "four times the steps": (LONG, 3),
    "four times the steps, both with half the learning rate": (LONG | {"lr": 0.5}, 1),
}
"""Where the best of all is put beside ddp once more, without tuning anything again, and on how many seeds."""

BEST = list(STEPS)[-1]
"""What the last of STEPS ends with."""

FINAL = "validation_loss_averaged"
"""Of the weights that a run ends with: the replicas' late averages, averaged."""

FACTORS = ("lr", "every", "every_final")


def changed(settings: Settings, changes_made: Settings) -> Settings:
    """Settings with changes, those of FACTORS multiplied where they are not whole numbers of steps."""
    found = dict(settings)
    for key, value in changes_made.items():
        if key in FACTORS and isinstance(value, float):
            value = settings["lr"] * value if key == "lr" else max(1, round(settings["every"] * value))
        found[key] = value
    return found


def add(runs: Runs, settings: Settings, name: str, seed: int) -> Settings:
    """The best of a step's alternatives, or the settings as they are."""
    candidates = [settings, *(changed(settings, changes_made) for changes_made in STEPS[name].values())]
    for candidate in candidates:
        runs.start(candidate, seed)
    best = min(candidates, key=lambda candidate: runs.loss(candidate, seed, FINAL))
    runs.store.choose(name, best)
    return best


def run(options: Options, store: Store) -> list[Part]:
    steps = list(STEPS)[: options.steps_of_search]
    with Runs(store, regime(options.steps, replicas=options.replicas)) as runs, ThreadPoolExecutor(3) as threads:
        yardsticks = {"ddp": {"method": "ddp", "inner": "adamw"}, "ddp, Muon": {"method": "ddp", "inner": "muon"}}
        searches = {
            name: threads.submit(tune, runs, name, settings, options.budget, options.seeds[0], AXES[:1])
            for name, settings in {**yardsticks, PUBLISHED_ROW: PUBLISHED}.items()
        }
        settings = searches[PUBLISHED_ROW].result()
        for name in steps:
            settings = add(runs, settings, name, options.seeds[0])
        rows = [search.result() for search in searches.values()] + [store.chosen[name] for name in steps]
        futures = [future for row in rows for future in runs.start_all(row, options.seeds)]
        for changes_made, number in list(REGIMES.values())[: options.regimes]:
            for name in ("ddp, Muon", BEST):
                futures += runs.start_all(changed(store.chosen[name], changes_made), options.seeds[:number])
        for future in futures:
            future.result()
    return [part for parts in tables(store, options).values() for part in parts]


def ended(results: dict[int, Result]) -> dict[int, Result]:
    """Results whose loss is that of the weights that runs end with."""
    return {seed: {**result, "validation_loss": result.get(FINAL)} for seed, result in results.items()}


class Found:
    """The kept results of one regime, with the losses of the weights that runs end with."""

    def __init__(self, store: Store, options: Options) -> None:
        self.store = store
        self.common = regime(options.steps, replicas=options.replicas)
        self.steps = [name for name in STEPS if name in store.chosen]

    def of(self, settings: Settings) -> dict[int, Result]:
        """By seed."""
        return ended(self.store.results(self.common | settings))


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """What was added, the best in other regimes, and what was not kept."""
    if PUBLISHED_ROW not in store.chosen:
        return {}
    found = Found(store, options)
    return {
        "gap": [added_table(found)],
        "gap regimes": [regimes_table(found)],
        "gap alternatives": [alternatives_table(found, options.seeds[0])],
    }


def added_table(found: Found) -> Table:
    chosen = found.store.chosen
    yardsticks = {name: found.of(chosen[name]) for name in ("ddp", "ddp, Muon")}
    best = min(yardsticks.values(), key=lambda seeds: mean(r["validation_loss"] for r in seeds.values()))
    lines, before = [], Settings()
    for name in ("ddp", "ddp, Muon", PUBLISHED_ROW, *found.steps):
        settings = chosen[name]
        row = Row(name, found.common | settings, found.of(settings))
        new = {key: value for key, value in settings.items() if before.get(key) != value} if before else settings
        added = name in STEPS
        kept = in_words(new) or "nothing was better: as before"
        lines.append(
            (
                f"+ {name}" if added else name,
                kept if added else in_words(settings, ("method",)),
                around(row.losses),
                f"{around(changes(row.results, yardsticks['ddp']), 1, '+')} %",
                f"{around(changes(row.results, best), 1, '+')} %",
                row.times_fewer,
            )
        )
        if name == PUBLISHED_ROW or added:
            before = settings
    columns = ("what", "settings", "loss", "to ddp with AdamW", "to the better ddp", "fewer bytes")
    return Table(dict.fromkeys(columns, ""), lines)


def regimes_table(found: Found) -> Table:
    lines = []
    for name, (other, _) in REGIMES.items():
        if BEST not in found.store.chosen:
            break
        ddp, best = (found.of(changed(found.store.chosen[row], other)) for row in ("ddp, Muon", BEST))
        if ddp and best:
            losses = [around(result["validation_loss"] for result in seeds.values()) for seeds in (ddp, best)]
            fewer = mean(result["ddp_bytes"] / result["bytes_sent"] for result in best.values())
            lines.append((name, *losses, f"{around(changes(best, ddp), 1, '+')} %", f"{fewer:.1f}×"))
    return Table(dict.fromkeys(("", "ddp, Muon", "the best above", "gap", "fewer bytes"), ""), lines)


def alternatives_table(found: Found, seed: int) -> Table:
    settings, lines = found.store.chosen[PUBLISHED_ROW], []
    for name in found.steps:
        without = found.of(settings)
        for label, changes_made in STEPS[name].items():
            tried = found.of(changed(settings, changes_made))
            if seed in tried and tried[seed]["validation_loss"]:
                lines.append((name, label, f"{changes({seed: tried[seed]}, without)[0]:+.1f} %"))
        settings = found.store.chosen[name]
    return Table(dict.fromkeys(("added to the best so far", "alternative", "change of the loss, one seed"), ""), lines)
