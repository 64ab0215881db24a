"""Validation loss after the same tokens: ddp, diloco, noloco and local side by side, over several seeds.

    python bench/loss.py [--steps 600] [--seeds 0 1 2] [--out runs/bench-loss]

The outer momentum of diloco and noloco is tuned by the same search. Runs are simulated, as many at a time as there are
cores; a run that is finished is not made again.
"""

from __future__ import annotations

import functools
import json
import os
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import tyro

from farflung.config import Config
from farflung.training import launch


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
    out: Path = Path("runs/bench-loss")
    """Where the run folders go."""


MOMENTA = (0.3, 0.5, 0.9)
"""What the outer momentum of diloco and noloco is tuned over, on the first seed; 0.9 and 0.5 are the published ones."""

PUBLISHED: dict[str, float | None] = {"ddp": None, "diloco": 0.9, "noloco": 0.5, "local": None}


def run(options: Options, method: str, momentum: float | None, seed: int) -> dict[str, Any]:
    """The summary of one run, made unless it lies there already."""
    variant = method if momentum == PUBLISHED[method] else f"{method}-momentum-{momentum}"
    folder = options.out / f"{variant}-{options.steps}-seed{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        config = Config(
            method=method,
            every=None if momentum is None else options.every,
            outer_momentum=momentum,
            seed=seed,
            steps=options.steps,
            replicas=options.replicas,
            model=options.model,
            network="simulated",
            eval_sequences=256,
            eval_every=100,
            checkpoint_every=0,
            out=str(folder),
        )
        launch.prepare(config, folder, resume=folder.exists())
        launch.run_simulated(config, folder, resume=folder.exists())
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def row(name: str, runs: list[dict[str, Any]]) -> str:
    losses = [run["validation_loss"] for run in runs]
    deviation = stdev(losses) if len(losses) > 1 else 0.0
    averaged = mean(run["validation_loss_averaged"] for run in runs)
    sent = mean(run["bytes_sent"] for run in runs) / 1e6
    spread = mean(run["weight_spread"] for run in runs)
    each = "  ".join(f"{loss:6.4f}" for loss in losses)
    return f"{name:26} {mean(losses):7.4f} {deviation:7.4f}  {each}  {averaged:8.4f}  {sent:9.1f}  {spread:13.2g}"


def main(options: Options) -> None:
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:

        @functools.cache
        def started(method: str, momentum: float | None, seed: int) -> Future[dict[str, Any]]:
            return pool.submit(run, options, method, momentum, seed)

        def start(method: str, momentum: float | None, seeds: tuple[int, ...]) -> list[Future[dict[str, Any]]]:
            return [started(method, momentum, seed) for seed in seeds]

        published = {method: start(method, momentum, options.seeds) for method, momentum in PUBLISHED.items()}
        search = {
            (method, momentum): start(method, momentum, options.seeds[:1])[0]
            for method in ("diloco", "noloco")
            for momentum in MOMENTA
        }
        tried = {key: future.result()["validation_loss"] for key, future in search.items()}
        best = {m: min(MOMENTA, key=lambda momentum: tried[m, momentum]) for m in ("diloco", "noloco")}
        tuned = {method: start(method, momentum, options.seeds) for method, momentum in best.items()}
        results = {method: [future.result() for future in futures] for method, futures in published.items()}
        bests = {method: [future.result() for future in futures] for method, futures in tuned.items()}

    print(f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}, stdlib text")
    seeds = "  ".join(f"seed {seed}" for seed in options.seeds)
    print(f"{'method':26} {'loss':>7} {'+-':>7}  {seeds}  {'averaged':>8}  {'MB sent':>9}  {'weight spread':>13}")
    for method, runs in results.items():
        print(row(method, runs))
    for method, runs in bests.items():
        print(row(f"{method}, momentum {best[method]}", runs))
    for (method, momentum), loss in tried.items():
        print(f"tuning on seed {options.seeds[0]}: {method}, outer momentum {momentum}: {loss:.4f}")
    for name, pair in (("published settings", results), ("tuned", bests)):
        diloco, noloco = (mean(run["validation_loss"] for run in pair[method]) for method in ("diloco", "noloco"))
        print(f"noloco against diloco, {name}: {100 * (noloco / diloco - 1):+.2f} %")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
