"""How the gap to synchronous training grows with the number of replicas, and what it would be at 256.

    python bench/scaling.py [--steps 200] [--seeds 0 1] [--replicas 4 8 16 32]

With the settings that bench/frontier.py has found at 8 replicas, with a fixed batch per replica and with a fixed global
batch. Results go to bench/results/scaling.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro
from recorded import Recorded, Settings, regime


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    seeds: tuple[int, ...] = (0, 1)
    """One run of each row for each."""
    replicas: tuple[int, ...] = (4, 8, 16, 32)
    """Copies of the model."""


METHODS = ("ddp", "diloco, every 20", "noloco, every 20")
BATCH = 8
"""Sequences in a step of one of 8 replicas."""
BATCHES = {
    "fixed batch per replica": lambda replicas: BATCH,
    "fixed global batch": lambda replicas: 8 * BATCH // replicas,
}


def settings_of(tuned: Settings, batch: str, replicas: int) -> Settings:
    """A row's settings."""
    return {**tuned, "replicas": replicas, "batch_size": BATCHES[batch](replicas)}


def main(options: Options) -> None:
    frontier = Recorded("frontier", {})
    with Recorded("scaling", regime(options.steps)) as recorded:
        futures = [
            recorded.start(settings_of(frontier.chosen_as(method), batch, replicas), seed)
            for seed in options.seeds
            for replicas in options.replicas
            for batch in BATCHES
            for method in METHODS
        ]
        for future in futures:
            future.result()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
