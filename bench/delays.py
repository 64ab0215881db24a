"""What a delay costs: validation loss against the share of the exchange that it hides, for every merge.

    python bench/delays.py [--steps 200] [--every 20] [--replicas 4] [--out runs/bench-delays]

DiLoCo and NoLoCo on a simulated link where an exchange takes half a round. Each row has its own outer learning rate and
momentum, the best of the same grid. A run that is finished is not made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro
from simulated import Runs, Summary, Variant, losses

STEP_SECONDS = 0.1


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    every: int = 20
    """Inner steps between rounds."""
    replicas: int = 4
    """Copies of the model."""
    model: str = "micro"
    """What is trained."""
    batch_size: int = 4
    """Sequences in an inner step."""
    sequence_length: int = 32
    """Tokens in a sequence."""
    seeds: tuple[int, ...] = (0,)
    """One run of each row for each; tuning uses the first."""
    parameters: int = 133_440
    """Of the model at this sequence length; sets the link's rate."""
    methods: tuple[str, ...] = ("diloco", "noloco")
    """What to delay."""
    delays: tuple[int, ...] = (1, 2, 3, 4, 5, 10, 20)
    """Inner steps; that of a whole round is also made eagerly."""
    out: Path = Path("runs/bench-delays")
    """Where the run folders go."""


GRID = ((1.0, 0.0), (0.7, 0.3))
"""Outer learning rate and momentum."""


def rows(options: Options) -> list[tuple[int, str]]:
    """Delays and what becomes of the steps trained meanwhile."""
    delayed = [(delay, merge) for delay in options.delays for merge in ("kept", "dropped", "mixed")]
    return [(0, "kept"), *delayed, (options.every, "eager")]


def main(options: Options) -> None:
    for method in options.methods:
        share = 1.0 if method == "noloco" else 2 * (options.replicas - 1) / options.replicas
        exchange = options.every / 2 * STEP_SECONDS
        common = {
            "model": options.model,
            "steps": options.steps,
            "replicas": options.replicas,
            "batch_size": options.batch_size,
            "sequence_length": options.sequence_length,
            "max_tokens": 1_000_000,
            "every": options.every,
            "method": method,
            "eval_every": options.steps,
            "eval_sequences": 96,
            "log_every": options.steps,
            "latency_ms": 0.0,
            "step_ms": 1000 * STEP_SECONDS,
            "bandwidth_mbps": share * 4 * options.parameters * 8e-6 / exchange,
        }
        with Runs(options.out, **common) as runs:
            table(runs, method, options, exchange)


def table(runs: Runs, method: str, options: Options, exchange: float) -> None:
    grids = {
        (delay, merge): [
            Variant(f"lr {lr} momentum {m}", {"delay": delay, "merge": merge, "outer_lr": lr, "outer_momentum": m})
            for lr, m in GRID
        ]
        for delay, merge in rows(options)
    }
    for variants in grids.values():
        for variant in variants:
            runs.start(variant, options.seeds[0])
    print(
        f"\n{method}: {options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}; "
        "an exchange takes half a round"
    )
    print(f"{'delay':>5} {'merge':8} {'hidden':>7} {'loss':>7} {'of none':>8}  tuned to")
    undelayed = 0.0
    for (delay, merge), variants in grids.items():
        tried = {v: losses([runs.start(v, options.seeds[0])])[0] for v in variants}
        best = min(variants, key=lambda variant: tried[variant])
        futures = runs.start_all(best, options.seeds)
        loss = mean(losses(futures))
        undelayed = undelayed or loss
        hidden = mean(hidden_share(future.result(), exchange) for future in futures)
        print(
            f"{delay:5} {merge:8} {hidden:7.0%} {loss:7.4f} {loss / undelayed - 1:+8.2%}  {best.name}",
            flush=True,
        )


def hidden_share(summary: Summary, exchange: float) -> float:
    return max(0.0, 1 - summary["seconds_blocked"] / (summary["rounds"] * exchange))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
