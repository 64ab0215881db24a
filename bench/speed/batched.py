"""How much faster do simulated replicas train when they compute together?
Runs with `--batched-replicas`, on all cores, and without, on one, as simulations are: the tokens/s of all replicas in
the steps after the first few, without rounds. Takes five minutes.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import simulate
from farflung.outer import Session
from farflung.training.trainer import Trainer

FIRST = 2
"""Steps that a run takes while it still finds memory."""


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = ("8 micro adamw", "8 micro muon", "16 tiny adamw", "16 tiny muon")
    """Replicas, model and inner optimizer of each."""
    steps: int = 12
    """Inner steps measured."""
    batch_size: int = 8
    """Sequences of a replica's step."""
    sequence_length: int = 32
    """Tokens of each."""


SMOKE = Options(cases=("2 micro adamw",), steps=2)


@contextmanager
def ends_of_steps() -> Iterator[dict[int, float]]:
    """When the last replica had taken each step, in it: what comes before and after a run's steps does not count."""
    ends: dict[int, float] = {}
    original = Trainer._train_step

    def timed(trainer: Trainer, session: Session) -> None:
        original(trainer, session)
        ends[trainer.step] = time.perf_counter()

    with mock.patch.object(Trainer, "_train_step", timed):
        yield ends


def run(options: Options, store: Store) -> Iterator[Part]:
    shape = {"batch_size": options.batch_size, "sequence_length": options.sequence_length}
    shape |= {"max_tokens": 4_000_000, "eval_sequences": 1, "log_every": 1000, "checkpoint_every": 0}

    def rate(case: str, together: bool) -> float:
        replicas, model, inner = case.split()
        settings = {"replicas": int(replicas), "model": model, "inner": inner, "batched_replicas": together}
        folder, steps = store.scratch / "run", FIRST + options.steps + 1  # in the last, the replicas are judged
        shutil.rmtree(folder, ignore_errors=True)
        gc.collect()
        with ends_of_steps() as ends:
            simulate(folder, **shape, **settings, steps=steps, eval_every=steps, method="local")
        taken = ends[steps - 1] - ends[FIRST]
        return int(replicas) * options.steps * options.batch_size * options.sequence_length / taken

    def row(case: str) -> tuple[Cell, ...]:
        alone, together = (rate(case, each) for each in (False, True))
        return case, alone, together, together / alone

    columns = {"replicas": "", "one after the other": ",.0f", "together": ",.0f", "ratio": ".2f"}
    about = f"tokens/s; {options.batch_size} sequences of {options.sequence_length} a replica's step"
    yield Table(columns, map(row, options.cases), about)
