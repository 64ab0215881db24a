"""Training speed with a method against training alone: what its rounds cost on this machine.

    python bench/speed.py [--steps 200] [--every 50] [--replicas 2] [--repeats 3]

Real processes over torch.distributed, started in turns. On a machine that others use, too, speeds of different runs
differ by more than what rounds cost; what a run was blocked for is measured within it.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

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


def measure(method: str, options: Options) -> tuple[float, float]:
    """Tokens a second of all replicas from the first logged step to the last, and the share of time not blocked."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / method
        config = Settings.of(
            method=method,
            inner="adamw",
            every=None if method == "local" else options.every,
            steps=options.steps,
            replicas=options.replicas,
            checkpoint_every=0,
            eval_every=options.steps,
            out=str(out),
        )
        launch.prepare(config, out, resume=False)
        launch.launch_torch(config, out, resume=False)
        events = [json.loads(line) for path in out.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    first, last = min(event["step"] for event in steps), options.steps
    began = max(event["at"] for event in steps if event["step"] == first)
    ended = max(event["at"] for event in steps if event["step"] == last)
    blocked = [event["seconds_blocked"] / event["at"] for event in steps if event["step"] == last]
    rate = (
        (last - first) * config.island.batch_size * config.workload.sequence_length * options.replicas / (ended - began)
    )
    return rate, 1 - sum(blocked) / len(blocked)


def main(options: Options) -> None:
    seen: dict[str, list[tuple[float, float]]] = {"local": [], "noloco": [], "diloco": []}
    for _ in range(options.repeats):
        for method, measured in seen.items():
            measured.append(measure(method, options))
    print(
        f"{options.replicas} replicas, every={options.every}, {options.steps} steps, tiny, {options.repeats} runs each"
    )
    print(f"{'method':8} {'tokens/s':>9} {'of local':>9} {'not blocked':>12}   tokens/s of each run")
    alone = median(rate for rate, _ in seen["local"])
    for method, measured in seen.items():
        rate, free = (median(column) for column in zip(*measured, strict=True))
        each = "  ".join(f"{rate:,.0f}" for rate, _ in measured)
        print(f"{method:8} {rate:9,.0f} {rate / alone:9.1%} {free:12.1%}   {each}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
