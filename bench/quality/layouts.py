"""Do all layouts of a replica train the same model, whatever its codec?
Replicas of one process each, of pipeline stages, of shards, of both, and of all of these in one run, with the same
seed: the largest difference of any step's loss, and of the final validation loss, from the replicas of one process.
Real processes, as many as there are parts. Takes some twenty minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.events import StepEvent
from farflung.report.read import read_run

Losses = dict[tuple[int, int], float]
"""By replica and step."""

LAYOUTS = {
    "4 stages": ("--stages", "4"),
    "4 shards": ("--shard", "4"),
    "2 stages x 2 shards": ("--stages", "2", "--shard", "2"),
    "unlike islands": ("--islands", "1x1 2x1 1x2 2x2"),
}


@dataclass(frozen=True)
class Options:
    model: str = "tiny"
    """What is trained; it needs as many layers as stages."""
    steps: int = 20
    """Inner steps of each run, with a round each fifth."""
    rounds: tuple[str, ...] = (
        "diloco",
        "diloco ef-topk5",
        "diloco ef-lowrank16-int4",
        "noloco modulo4",
        "sparseloco",
        "dilocox",
    )
    """Methods, each with its codec if it has another than its own."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """What is beside one process."""


SMOKE = Options(model="micro", steps=5, rounds=("diloco ef-topk5",), layouts=("unlike islands",))


def replicas_of(layout: tuple[str, ...]) -> int:
    """How many replicas a layout is compared with, and has."""
    return len(layout[1].split()) if "--islands" in layout else 2


def losses(options: Options, rounds: str, replicas: int, layout: tuple[str, ...], folder: Path) -> tuple[Losses, float]:
    """Each step's loss of each replica, and the validation loss of the averaged weights."""
    method, _, codec = rounds.partition(" ")
    common = {
        "replicas": replicas,
        "steps": options.steps,
        "model": options.model,
        "method": method,
        "every": 5,
        "inner": "adamw",
        "batch-size": 16,
        "sequence-length": 32,
        "microbatches": 4,
        "log-every": 1,
        "eval-every": options.steps,
        "checkpoint-every": 0,
        "max-tokens": 200_000,
    }
    words = [word for name, value in common.items() for word in (f"--{name}", str(value))]
    words += [*(("--codec", codec) if codec else ()), *layout, "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "farflung", "train", *words], check=True, capture_output=True, env=environment
    )
    told = read_run(folder)
    found = {
        (replica, event.step): event.loss or 0.0 for replica in told.replicas for event in told.of(replica, StepEvent)
    }
    return found, json.loads((folder / "summary.json").read_text())["validation_loss_averaged"]


def run(options: Options, store: Store) -> Iterator[Part]:
    def rows() -> Iterator[tuple[Cell, ...]]:
        for rounds in options.rounds:
            alone: dict[int, tuple[Losses, float]] = {}
            for layout in options.layouts:
                replicas = replicas_of(LAYOUTS[layout])
                if replicas not in alone:
                    alone[replicas] = losses(options, rounds, replicas, (), store.scratch / f"{rounds} {replicas}")
                one, validation = alone[replicas]
                steps, ended = losses(options, rounds, replicas, LAYOUTS[layout], store.scratch / f"{rounds} {layout}")
                apart = max(abs(one[step] - steps[step]) for step in one)
                yield rounds, layout, validation, apart, abs(ended - validation)

    yield f"{options.model}, 2 replicas (of unlike islands 4), {options.steps} steps, every=5"
    columns = {
        "rounds": "",
        "layout": "",
        "validation loss of one process": ".4f",
        "largest difference of a loss": ".1e",
    }
    yield Table(columns | {"of the validation loss": ".1e"}, rows())
