"""What does a delay cost, for every merge, against the share of the exchange that it hides?
DiLoCo and NoLoCo on a simulated link where an exchange takes half a round; each row has its own outer learning rate
and momentum, the best of one grid, and the baseline is no delay. Takes about an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from bench.lib.runs import Runs, told_by
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table

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
    grid: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.7, 0.3))
    """Outer learning rates and momenta to tune over."""


SMOKE = Options(steps=4, every=2, replicas=2, methods=("noloco",), delays=(1,), grid=((0.7, 0.3),))


def rows(options: Options) -> list[tuple[int, str]]:
    """Delays and what becomes of the steps trained meanwhile."""
    delayed = [(delay, merge) for delay in options.delays for merge in ("kept", "dropped", "mixed")]
    return [(0, "kept"), *delayed, (options.every, "eager")]


def run(options: Options, store: Store) -> Iterator[Part]:
    for method in options.methods:
        share = 1.0 if method == "noloco" else 2 * (options.replicas - 1) / options.replicas
        exchange = options.every / 2 * STEP_SECONDS
        common = {
            **told_by(options, "every"),
            "inner": "adamw",
            "max_tokens": 1_000_000,
            "method": method,
            "eval_every": options.steps,
            "eval_sequences": 96,
            "log_every": options.steps,
            "latency_ms": 0.0,
            "step_ms": 1000 * STEP_SECONDS,
            "bandwidth_mbps": share * 4 * options.parameters * 8e-6 / exchange,
        }
        with Runs(store, common) as runs:
            yield table(runs, method, options, exchange)


def table(runs: Runs, method: str, options: Options, exchange: float) -> Table:
    grids: dict[tuple[int, str], dict[str, Settings]] = {
        (delay, merge): {
            f"lr {lr:g} momentum {m:g}": {"delay": delay, "merge": merge, "outer_lr": lr, "outer_momentum": m}
            for lr, m in options.grid
        }
        for delay, merge in rows(options)
    }
    lines: list[tuple[Cell, ...]] = []
    for (delay, merge), best in runs.best_of_each(grids, options.seeds[0]).items():
        results = runs.on_seeds(grids[delay, merge][best], options.seeds).values()
        loss = mean(result["validation_loss"] for result in results)
        undelayed = lines[0][3] if lines else loss
        hidden = mean(hidden_share(result, exchange) for result in results)
        lines.append((delay, merge, hidden, loss, loss / undelayed - 1, best))
    return Table(
        {"delay": "d", "merge": "", "hidden": ".0%", "loss": ".4f", "of none": "+.2%", "tuned to": ""},
        lines,
        f"{method}: {options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}; "
        "an exchange takes half a round",
    )


def hidden_share(result: Result, exchange: float) -> float:
    return float(max(0.0, 1 - result["seconds_blocked"] / (result["rounds"] * exchange)))
