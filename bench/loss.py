"""Validation loss after the same tokens: ddp, diloco, noloco and local side by side, over several seeds.

    python bench/loss.py [--steps 600] [--seeds 0 1 2] [--out runs/bench-loss]

Runs are simulated, as many at a time as there are cores; a run that is finished is not made again.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
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


METHODS: dict[str, dict[str, Any]] = {"ddp": {}, "diloco": {"every": 0}, "noloco": {"every": 0}, "local": {}}


def run(options: Options, method: str, seed: int) -> dict[str, Any]:
    folder = options.out / f"{method}-{options.steps}-seed{seed}"
    summary = folder / "summary.json"
    if not summary.exists():
        settings = dict.fromkeys(METHODS[method], options.every)
        config = Config(
            method=method,
            seed=seed,
            steps=options.steps,
            replicas=options.replicas,
            model=options.model,
            network="simulated",
            eval_sequences=256,
            eval_every=100,
            checkpoint_every=0,
            out=str(folder),
            **settings,
        )
        resume = folder.exists()
        launch.prepare(config, folder, resume)
        launch.run_simulated(config, folder, resume)
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def main(options: Options) -> None:
    jobs = [(method, seed) for seed in options.seeds for method in METHODS]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        running = {job: pool.submit(run, options, *job) for job in jobs}
        results = {job: future.result() for job, future in running.items()}
    print(f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}, stdlib text")
    seeds = "  ".join(f"seed {seed}" for seed in options.seeds)
    print(f"{'method':8} {'loss':>7} {'spread':>7}  {seeds}  {'averaged':>8}  {'MB sent':>9}  {'weight spread':>13}")
    for method in METHODS:
        rows = [results[method, seed] for seed in options.seeds]
        losses = [row["validation_loss"] for row in rows]
        sent = mean(row["bytes_sent"] for row in rows) / 1e6
        print(
            f"{method:8} {mean(losses):7.4f} {stdev(losses) if len(losses) > 1 else 0:7.4f}  "
            + "  ".join(f"{loss:6.4f}" for loss in losses)
            + f"  {mean(row['validation_loss_averaged'] for row in rows):8.4f}"
            f"  {sent:9.1f}  {mean(row['weight_spread'] for row in rows):13.2g}"
        )
    diloco, noloco = (mean(results[m, s]["validation_loss"] for s in options.seeds) for m in ("diloco", "noloco"))
    print(f"noloco against diloco: {100 * (noloco / diloco - 1):+.2f} %")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
