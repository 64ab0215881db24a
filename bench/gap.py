"""What closes the gap to synchronous training, at a hundredth of its bytes: one thing added at a time.

    python bench/gap.py [--steps 200] [--seeds 0 1 2]

Begins with ddp and DiLoCo as published, and keeps of each step's alternatives the best on the first seed, if it is
better than without. All rows but ddp's send about a hundredth of ddp's bytes. Results go to bench/results/gap.json.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tyro
from recorded import Recorded, Settings, regime
from search import AXES, tune


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; what is better is decided on the first."""
    budget: int = 4
    """Runs that the search of each learning rate may make."""


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
    "late average": {"the last tenth": {"late_average": 0.1}, "the last quarter": {"late_average": 0.25}},
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


def changed(settings: Settings, changes: Settings) -> Settings:
    """Settings with changes, those of FACTORS multiplied where they are not whole numbers of steps."""
    found = dict(settings)
    for key, value in changes.items():
        if key in FACTORS and isinstance(value, float):
            value = settings["lr"] * value if key == "lr" else max(1, round(settings["every"] * value))
        found[key] = value
    return found


def add(recorded: Recorded, settings: Settings, name: str, seed: int) -> Settings:
    """The best of a step's alternatives, or the settings as they are."""
    candidates = [settings, *(changed(settings, changes) for changes in STEPS[name].values())]
    for candidate in candidates:
        recorded.start(candidate, seed)
    best = min(candidates, key=lambda candidate: recorded.loss(candidate, seed, FINAL))
    recorded.choose(name, best)
    return best


def main(options: Options) -> None:
    with Recorded("gap", regime(options.steps)) as recorded, ThreadPoolExecutor(3) as threads:
        yardsticks = {"ddp": {"method": "ddp", "inner": "adamw"}, "ddp, Muon": {"method": "ddp", "inner": "muon"}}
        searches = {
            name: threads.submit(tune, recorded, name, settings, options.budget, options.seeds[0], AXES[:1])
            for name, settings in {**yardsticks, "DiLoCo as published": PUBLISHED}.items()
        }
        settings = searches["DiLoCo as published"].result()
        for name in STEPS:
            settings = add(recorded, settings, name, options.seeds[0])
        rows = [search.result() for search in searches.values()] + [recorded.chosen[name] for name in STEPS]
        futures = [future for row in rows for future in recorded.start_all(row, options.seeds)]
        for name in ("ddp, Muon", BEST):
            for changes, number in REGIMES.values():
                futures += recorded.start_all(changed(recorded.chosen[name], changes), options.seeds[:number])
        for future in futures:
            future.result()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
