"""Random routes against fixed ones: loss, and how far apart the replicas' weights are.

    python bench/routes.py [--steps 400] [--seeds 0 1 2] [--out runs/bench-routes]

Two stages × four replicas, real processes on one machine. Every replica trains on data of its own, with noloco's rounds
every 20 steps. With --methods noloco local, also without any, where only routes mix what replicas learn. The spread is
the mean over evaluations each 10 steps, half of them just after a round, half between two: of all, and of the last
quarter of the run.
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
    heads = f"{'method':8} {'seed':>4} {'routes':>7} {'loss':>8} {'of the average':>15} {'weight spread':>14}"
    print(f"{heads} {'of the last quarter':>20}")
    for method in options.methods:
        ratios = []
        for seed in options.seeds:
            found = {}
            for routes in ("fixed", "random"):
                name = f"{method}-{routes}-{options.every}-{options.steps}-{seed}"
                rounds = {} if method == "local" else {"every": options.every}
                run = train(options.out / name, **common, **rounds, method=method, routes=routes, seed=seed)
                spreads = list(run.run.consensus_distance().values())
                loss, spread, last = run.summary["validation_loss"], mean(spreads), mean(spreads[-len(spreads) // 4 :])
                found[routes] = loss, spread, last
                averaged = run.summary["validation_loss_averaged"]
                cells = f"{method:8} {seed:4} {routes:>7} {loss:8.4f} {averaged:15.4f}"
                print(f"{cells} {spread:14.5f} {last:20.5f}", flush=True)
            ratios.append([random / fixed for random, fixed in zip(found["random"], found["fixed"], strict=True)])
        loss, spread, last = (mean(kind) for kind in zip(*ratios, strict=True))
        change = f"change the loss by {loss - 1:+.2%}, the spread to {spread:.2f}, at last {last:.2f}"
        print(f"{method}: random routes {change}\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
