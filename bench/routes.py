"""Random routes against fixed ones: loss, and how far apart the replicas' weights are.

    python bench/routes.py [--steps 400] [--seeds 0 1 2] [--out runs/bench-routes]

Two stages × four replicas, real processes on one machine. Every replica trains on data of its own, with noloco's rounds
every 20 steps. With --methods noloco local, also without any, where only routes mix what replicas learn. The spread is
the mean over evaluations each 10 steps: half of them just after a round, half between two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro
from real import train


@dataclass(frozen=True)
class Options:
    steps: int = 400
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each kind for each."""
    every: int = 20
    """Inner steps between noloco's rounds."""
    methods: tuple[str, ...] = ("noloco",)
    """How replicas exchange besides."""
    model: str = "micro"
    """What is trained."""
    out: Path = Path("runs/bench-routes")
    """Where the run folders go."""


def main(options: Options) -> None:
    common = {"model": options.model, "replicas": 4, "stages": 2, "steps": options.steps, "checkpoint_every": 0}
    common |= {"batch_size": 8, "sequence_length": 64, "eval_every": options.every // 2}
    print(f"{options.model}, 4 replicas × 2 stages, {options.steps} steps, a round each {options.every}")
    print(f"{'method':8} {'seed':>4} {'routes':>7} {'loss':>8} {'of the average':>15} {'weight spread':>14}")
    for method in options.methods:
        ratios, spreads = [], []
        for seed in options.seeds:
            found = {}
            for routes in ("fixed", "random"):
                name = f"{method}-{routes}-{options.every}-{options.steps}-{seed}"
                rounds = {} if method == "local" else {"every": options.every}
                run = train(options.out / name, **common, **rounds, method=method, routes=routes, seed=seed)
                loss, averaged = run.summary["validation_loss"], run.summary["validation_loss_averaged"]
                spread = mean(run.run.spread().values())
                found[routes] = loss, spread
                print(f"{method:8} {seed:4} {routes:>7} {loss:8.4f} {averaged:15.4f} {spread:14.5f}", flush=True)
            ratios.append(found["random"][0] / found["fixed"][0] - 1)
            spreads.append(found["random"][1] / found["fixed"][1])
        print(
            f"{method}: random routes change the loss by {mean(ratios):+.2%}, the spread to {mean(spreads):.2f} of it\n"
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
