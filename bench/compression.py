"""Loss at equal tokens and bytes sent: compressed and overlapped methods against DiLoCo and NoLoCo, seed by seed.

    python bench/compression.py [--table all|diloco|noloco] [--steps 600] [--model micro] [--out runs/bench-compression]

Outer learning rate and momentum of each method are the best of one grid on the first seed, DiLoCo's and NoLoCo's as
those of their rivals. Runs are simulated; one that is finished is not made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from simulated import Runs, Variant, row


@dataclass(frozen=True)
class Options:
    table: Literal["all", "diloco", "noloco"] = "all"
    """Which table to make."""
    steps: int = 600
    """Inner steps of each replica."""
    every: int = 5
    """Inner steps between rounds: few, so that a short run has enough rounds for error feedback to catch up."""
    replicas: int = 8
    """Copies of the model."""
    model: str = "micro"
    """What is trained."""
    batch_size: int = 4
    """Sequences in an inner step."""
    sequence_length: int = 64
    """Tokens in a sequence."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; tuning uses the first."""
    out: Path = Path("runs/bench-compression")
    """Where the run folders go."""


GRID = ((1.0, 0.0), (0.7, 0.3), (0.7, 0.0))
"""Outer learning rate and momentum."""

RANK, SPARSE = "lowrank18-int4", "topk1.1-int2"
"""At rank 18, a micro model's packets are about a sixteenth of its float32 messages."""


Searches = dict[str, dict[str, Any]]
"""Settings of methods, by name; outer learning rate and momentum are to be found."""


def tuned(runs: Runs, seed: int, searches: Searches) -> list[Variant]:
    """For each method the best of the grid, named so."""
    grids = {
        name: [
            Variant(f"lr {lr:g} momentum {momentum:g}", {**settings, "outer_lr": lr, "outer_momentum": momentum})
            for lr, momentum in GRID
        ]
        for name, settings in searches.items()
    }
    for grid in grids.values():
        for variant in grid:
            runs.start(variant, seed)
    best = []
    for name, grid in grids.items():
        print(name, flush=True)
        found = runs.best(grid, seed)
        best.append(found.but(f"{name}, {found.name}"))
    return best


def diloco_table(runs: Runs, seeds: tuple[int, ...]) -> None:
    """DiLoCo's family."""
    searches: Searches = {
        "diloco": {"method": "diloco"},
        "diloco compressed": {"method": "diloco", "codec": f"ef-{RANK}"},
        "dilocox": {"method": "dilocox", "codec": f"ef-{RANK}", "adapt": False},
        "streaming-diloco": {"method": "streaming-diloco", "fragments": 2, "delay": 1, "merge": "kept"},
    }
    diloco, compressed, dilocox, streaming = tuned(runs, seeds[0], searches)
    sparseloco = Variant("sparseloco 1.1 %", {"method": "sparseloco", "codec": f"ef-{SPARSE}"})
    show(
        runs,
        seeds,
        diloco,
        streaming,
        streaming.but("  mixed half and half", merge="mixed"),
        compressed,
        compressed.but("  without error feedback", codec=RANK),
        dilocox,
        dilocox.but("  without error feedback", codec=RANK),
        sparseloco,
        sparseloco.but("  without error feedback", codec=SPARSE),
    )


def noloco_table(runs: Runs, seeds: tuple[int, ...]) -> None:
    """NoLoCo's family."""
    searches: Searches = {
        "noloco": {"method": "noloco"},
        "nolocox": {"method": "nolocox", "codec": "modulo3x2", "adapt": False},
    }
    noloco, nolocox = tuned(runs, seeds[0], searches)
    show(
        runs,
        seeds,
        noloco,
        noloco.but("noloco, modulo4", codec="modulo4"),
        noloco.but("noloco, modulo3", codec="modulo3"),
        nolocox.but("nolocox's delay alone", codec="float32"),
        nolocox,
    )


def show(runs: Runs, seeds: tuple[int, ...], baseline: Variant, *others: Variant) -> None:
    """Makes the runs and prints a line for each variant."""
    futures = {variant: runs.start_all(variant, seeds) for variant in (baseline, *others)}
    each = "  ".join(f"seed {seed}" for seed in seeds)
    print(f"\n{'method':44} {'loss':>7} {'against the first':>19}  {each}  {'all sent':>11} {'fewer':>7}")
    for variant in futures:
        print(row(variant.name, futures[variant], futures[baseline]), flush=True)
    print()


def main(options: Options) -> None:
    common = {
        "model": options.model,
        "steps": options.steps,
        "every": options.every,
        "replicas": options.replicas,
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "max_tokens": 2_000_000,
        "eval_sequences": 128,
        "eval_every": options.steps,
        "log_every": 50,
    }
    print(f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}, stdlib text")
    with Runs(options.out, **common) as runs:
        if options.table in ("all", "diloco"):
            diloco_table(runs, options.seeds)
        if options.table in ("all", "noloco"):
            noloco_table(runs, options.seeds)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
