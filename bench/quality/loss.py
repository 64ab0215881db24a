"""What do DiLoCo and NoLoCo reach beside ddp and beside no exchange, after the same tokens?
Several seeds of each, with outer momenta as published and as tuned by one search for both; the baselines are ddp
above and local below. Takes about an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, stdev

from bench.lib.runs import Runs
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table


@dataclass(frozen=True)
class Options:
    steps: int = 600
    """Inner steps of each replica."""
    every: int = 20
    """Inner steps between rounds."""
    replicas: int = 4
    """Copies of the model."""
    model: str = "tiny"
    """What is trained."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each method for each."""
    momenta: tuple[float, ...] = (0.3, 0.5, 0.9)
    """What outer momentum is tuned over, on the first seed; 0.9 (diloco) and 0.5 (noloco) are the published ones."""


SMOKE = Options(steps=2, every=1, replicas=2, model="micro", seeds=(0,), momenta=(0.5,))


def published(every: int) -> dict[str, Settings]:
    """Each method as published."""
    return {
        "ddp": {"method": "ddp"},
        "diloco": {"method": "diloco", "every": every, "outer_momentum": 0.9},
        "noloco": {"method": "noloco", "every": every, "outer_momentum": 0.5},
        "local": {"method": "local"},
    }


def run(options: Options, store: Store) -> Iterator[Part]:
    common = {"inner": "adamw", "steps": options.steps, "replicas": options.replicas, "model": options.model}
    rows = published(options.every)
    with Runs(store, common | {"eval_sequences": 256, "eval_every": min(100, options.steps)}) as runs:
        tuned = {}
        for settings in rows.values():
            runs.start_all(settings, options.seeds)
        for name in ("diloco", "noloco"):
            grid = {f"{name}, momentum {m:g}": {**rows[name], "outer_momentum": m} for m in options.momenta}
            best = runs.best(grid, options.seeds[0])
            tuned[name] = (best, grid[best])
        rows |= dict(tuned.values())
        found = {name: list(runs.on_seeds(settings, options.seeds).values()) for name, settings in rows.items()}
    columns = {"method": "", "loss": ".4f", "+-": ".4f", **{f"seed {seed}": ".4f" for seed in options.seeds}}
    columns |= {"averaged": ".4f", "MB sent": ".1f", "weight spread": ".2g"}
    yield Table(
        columns,
        [row(name, results) for name, results in found.items()],
        f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}, stdlib text",
    )
    names = {"published settings": ("diloco", "noloco"), "tuned": (tuned["diloco"][0], tuned["noloco"][0])}
    for settings_kind, pair in names.items():
        diloco, noloco = (mean(result["validation_loss"] for result in found[name]) for name in pair)
        yield f"noloco against diloco, {settings_kind}: {100 * (noloco / diloco - 1):+.2f} %"


def row(name: str, results: list[Result]) -> tuple[str | float, ...]:
    losses = [result["validation_loss"] for result in results]
    return (
        name,
        mean(losses),
        stdev(losses) if len(losses) > 1 else 0.0,
        *losses,
        mean(result["validation_loss_averaged"] for result in results),
        mean(result["bytes_sent"] for result in results) / 1e6,
        mean(result["weight_spread"] for result in results),
    )
