"""Validation loss after the same tokens: ddp, diloco, noloco and local side by side, over several seeds.

    python bench/loss.py [--steps 600] [--seeds 0 1 2] [--out runs/bench-loss]

The outer momentum of diloco and noloco is tuned by the same search. Runs are simulated, as many at a time as there are
cores; a run that is finished is not made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import tyro
from simulated import Runs, Summary, Variant


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


def variants(every: int) -> dict[str, Variant]:
    """Each method as published."""
    return {
        "ddp": Variant("ddp", {"method": "ddp"}),
        "diloco": Variant("diloco", {"method": "diloco", "every": every, "outer_momentum": 0.9}),
        "noloco": Variant("noloco", {"method": "noloco", "every": every, "outer_momentum": 0.5}),
        "local": Variant("local", {"method": "local"}),
    }


def row(name: str, summaries: list[Summary]) -> str:
    losses = [summary["validation_loss"] for summary in summaries]
    deviation = stdev(losses) if len(losses) > 1 else 0.0
    averaged = mean(summary["validation_loss_averaged"] for summary in summaries)
    sent = mean(summary["bytes_sent"] for summary in summaries) / 1e6
    spread = mean(summary["weight_spread"] for summary in summaries)
    each = "  ".join(f"{loss:6.4f}" for loss in losses)
    return f"{name:26} {mean(losses):7.4f} {deviation:7.4f}  {each}  {averaged:8.4f}  {sent:9.1f}  {spread:13.2g}"


def main(options: Options) -> None:
    print(f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}, stdlib text")
    published = variants(options.every)
    common = {"steps": options.steps, "replicas": options.replicas, "model": options.model}
    with Runs(options.out, **common, eval_sequences=256, eval_every=100) as runs:
        started = {name: runs.start_all(variant, options.seeds) for name, variant in published.items()}
        tuned = {}
        for name in ("diloco", "noloco"):
            grid = [published[name].but(f"{name}, momentum {m}", outer_momentum=m) for m in MOMENTA]
            tuned[name] = runs.best(grid, options.seeds[0])
        best = {name: runs.start_all(variant, options.seeds) for name, variant in tuned.items()}
        results = {name: [future.result() for future in futures] for name, futures in started.items()}
        bests = {name: [future.result() for future in futures] for name, futures in best.items()}

    seeds = "  ".join(f"seed {seed}" for seed in options.seeds)
    print(f"{'method':26} {'loss':>7} {'+-':>7}  {seeds}  {'averaged':>8}  {'MB sent':>9}  {'weight spread':>13}")
    for name, summaries in results.items():
        print(row(name, summaries))
    for name, summaries in bests.items():
        print(row(tuned[name].name, summaries))
    for settings, pair in (("published settings", results), ("tuned", bests)):
        diloco, noloco = (mean(s["validation_loss"] for s in pair[name]) for name in ("diloco", "noloco"))
        print(f"noloco against diloco, {settings}: {100 * (noloco / diloco - 1):+.2f} %")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
