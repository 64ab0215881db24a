"""Do random routes between pipeline stages keep replicas together, and what do they cost in loss?
Two stages × four replicas, real processes on one machine, each replica with data of its own; the baseline is fixed
routes, with noloco's rounds every 20 steps or (`--methods noloco local`) without any, where only routes mix what
replicas learn. The spread is the mean over evaluations each 10 steps, of all and of the run's last quarter. Takes
about an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import train


@dataclass(frozen=True)
class Options:
    steps: int = 400
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each kind for each."""
    every: int = 20
    """Inner steps between noloco's rounds."""
    replicas: int = 4
    """Copies of the model."""
    methods: tuple[str, ...] = ("noloco",)
    """How replicas exchange besides."""
    model: str = "micro"
    """What is trained."""
    routes: tuple[str, ...] = ("fixed", "random")
    """Which to compare."""


SMOKE = Options(steps=2, seeds=(0,), every=2, replicas=2, routes=("random",))


def run(options: Options, store: Store) -> Iterator[Part]:
    common = {"model": options.model, "replicas": options.replicas, "stages": 2, "steps": options.steps}
    common |= {"batch_size": 8, "sequence_length": 64, "eval_every": options.every // 2, "checkpoint_every": 0}
    ratios: dict[str, list[list[float]]] = {method: [] for method in options.methods}

    def rows() -> Iterator[tuple[Cell, ...]]:
        for method in options.methods:
            for seed in options.seeds:
                found = {}
                for routes in options.routes:
                    rounds = {} if method == "local" else {"every": options.every}
                    settings = {**common, **rounds, "method": method, "routes": routes}
                    result = store.once(settings, seed, lambda: measured(store, seed, settings))  # noqa: B023
                    found[routes] = result["validation_loss"], result["spread"], result["last_spread"]
                    loss, spread, last = found[routes]
                    yield method, seed, routes, loss, result["validation_loss_averaged"], spread, last
                if len(found) == 2:
                    pairs = zip(found["random"], found["fixed"], strict=True)
                    ratios[method].append([random / fixed for random, fixed in pairs])

    columns = {"method": "", "seed": "d", "routes": "", "loss": ".4f", "of the average": ".4f"}
    columns |= {"weight spread": ".5f", "of the last quarter": ".5f"}
    about = (
        f"{options.model}, {options.replicas} replicas × 2 stages, {options.steps} steps, a round each {options.every}"
    )
    yield Table(columns, rows(), about)
    for method, each in ratios.items():
        if not each:
            continue
        loss, spread, last = (mean(kind) for kind in zip(*each, strict=True))
        change = f"change the loss by {loss - 1:+.2%}, the spread to {spread:.2f}, at last {last:.2f}"
        yield f"{method}: random routes {change}"


def measured(store: Store, seed: int, settings: Settings) -> Result:
    run = train(store.scratch / "run", **settings, seed=seed)
    spreads = list(run.run.consensus_distance().values())
    kept: dict[str, Any] = {key: run.summary[key] for key in ("validation_loss", "validation_loss_averaged")}
    return {**kept, "spread": mean(spreads), "last_spread": mean(spreads[-len(spreads) // 4 :])}
