"""Training speed with a method against training alone: what its rounds cost on this machine.

    python bench/speed.py [--steps 200] [--every 50] [--replicas 2] [--repeats 3]

Real processes over torch.distributed, started in turns, so that a slow moment of the machine meets both.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from farflung.config import Config
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


def tokens_per_second(method: str, options: Options) -> float:
    """Of the whole run from its first step to its last, all replicas."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / method
        config = Config(
            method=method,
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
    return (last - first) * config.tokens_per_step * options.replicas / (ended - began)


def main(options: Options) -> None:
    seen: dict[str, list[float]] = {"local": [], "noloco": [], "diloco": []}
    for _ in range(options.repeats):
        for method, rates in seen.items():
            rates.append(tokens_per_second(method, options))
    print(
        f"{options.replicas} replicas, every={options.every}, {options.steps} steps, tiny, {options.repeats} runs each"
    )
    print(f"{'method':8} {'tokens/s':>9} {'of local':>9}   each run")
    for method, rates in seen.items():
        share = median(rates) / median(seen["local"])
        print(f"{method:8} {median(rates):9,.0f} {share:9.1%}   " + "  ".join(f"{rate:,.0f}" for rate in rates))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
