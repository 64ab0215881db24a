"""What does a method cost an inner loop, on this machine?
Tokens a second of real processes over torch.distributed, started in turns; the baseline is the same loop without any
rounds. On a machine that others use, too, speeds of different runs differ by more than what rounds cost; what a run
was blocked for is measured within it. Takes some ten minutes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from farflung.events import StepEvent
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.training import launch


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    every: int = 50
    """Inner steps between rounds."""
    replicas: int = os.cpu_count() or 1
    """Processes; more than there are cores would measure the scheduler."""
    repeats: int = 3
    """Runs of each method."""
    model: str = "tiny"
    """What is trained."""
    methods: tuple[str, ...] = ("local", "noloco", "diloco")
    """What to measure, beside local."""


SMOKE = Options(steps=4, every=2, replicas=2, repeats=1, model="micro", methods=("local",))


def measure(method: str, options: Options) -> tuple[float, float]:
    """Tokens a second of all replicas from the first logged step to the last, and the share of time not blocked."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / method
        config = Settings.of(
            method=method,
            inner="adamw",
            every=None if method == "local" else options.every,
            steps=options.steps,
            model=options.model,
            log_every=max(1, min(10, options.steps // 4)),
            replicas=options.replicas,
            checkpoint_every=0,
            eval_every=options.steps,
            out=str(out),
        )
        launch.prepare(config, out, resume=False)
        launch.launch_torch(config, out, resume=False)
        steps = read_run(out).all_of(StepEvent)
    first, last = min(event.step for event in steps), options.steps
    began = max(event.at for event in steps if event.step == first)
    ends = [event for event in steps if event.step == last]
    tokens = (last - first) * config.island.batch_size * config.workload.sequence_length * options.replicas
    rate = tokens / (max(event.at for event in ends) - began)
    return rate, 1 - mean(event.seconds_blocked / event.at for event in ends)


def run(options: Options, store: Store) -> Iterator[Part]:
    seen: dict[str, list[tuple[float, float]]] = {method: [] for method in options.methods}
    for _ in range(options.repeats):
        for method, measured in seen.items():
            measured.append(measure(method, options))
    alone = median(rate for rate, _ in seen["local"])

    def row(method: str, measured: list[tuple[float, float]]) -> tuple[Cell, ...]:
        rate, free = (median(column) for column in zip(*measured, strict=True))
        return method, rate, rate / alone, free, "  ".join(f"{rate:,.0f}" for rate, _ in measured)

    columns = {"method": "", "tokens/s": ",.0f", "of local": ".1%", "not blocked": ".1%", "tokens/s of each run": ""}
    about = f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}"
    yield Table(columns, [row(*one) for one in seen.items()], f"{about}, {options.repeats} runs each")
