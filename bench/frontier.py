"""Loss against bytes for all methods: 8 replicas, learning rates of all tuned by one search with one budget.

    python bench/frontier.py [--steps 200] [--budget 6] [--seeds 0 1 2]

Tuned on the first seed. Results go to bench/results/frontier.json; bench/evidence.py makes tables and plots of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import tyro
from recorded import Recorded, Settings
from search import Axis, Point, compass

from farflung.methods import settings_of


@dataclass(frozen=True)
class Options:
    steps: int = 200
    """Inner steps of each replica."""
    model: str = "micro"
    """What is trained."""
    replicas: int = 8
    """Copies of the model."""
    budget: int = 6
    """Runs that the search of each row may make."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each tuned row for each."""


ROWS: dict[str, Settings] = {
    "ddp": {"method": "ddp"},
    "dct": {"method": "dct"},
    "demo": {"method": "demo"},
    "diloco, every 5": {"method": "diloco", "every": 5},
    "diloco, every 20": {"method": "diloco", "every": 20},
    "streaming-diloco, every 20": {"method": "streaming-diloco", "every": 20, "fragments": 2, "delay": 2},
    "eager-diloco, every 20": {"method": "eager-diloco", "every": 20},
    "dilocox, every 20": {"method": "dilocox", "every": 20, "codec": "ef-lowrank18-int4", "adapt": False},
    "sparseloco, every 5": {"method": "sparseloco", "every": 5},
    "noloco, every 5": {"method": "noloco", "every": 5},
    "noloco, every 20": {"method": "noloco", "every": 20},
    "noloco, every 5, modulo4": {"method": "noloco", "every": 5, "codec": "modulo4"},
    "nolocox, every 20": {"method": "nolocox", "every": 20, "adapt": False},
    "local": {"method": "local"},
}

START: Point = {"lr": 6e-3, "outer_momentum": 0.5, "outer_lr": 0.7}
"""Where every search begins."""

AXES = (
    Axis("lr", step=2.0),
    Axis("outer_momentum", step=0.2, factor=False, most=0.95),
    Axis("outer_lr", step=1.4),
)

SEARCHED = 0
"""The seed that is tuned on."""


def common(options: Options) -> Settings:
    """Settings of all runs."""
    return {
        "model": options.model,
        "steps": options.steps,
        "replicas": options.replicas,
        "batch_size": 8,
        "sequence_length": 32,
        "max_tokens": 4_000_000,
        "eval_sequences": 128,
        "eval_every": options.steps,
        "log_every": options.steps,
    }


def searched(method: str) -> list[Axis]:
    """The axes that a method has."""
    return [axis for axis in AXES if axis.name == "lr" or axis.name in settings_of(method)]


def tune(recorded: Recorded, name: str, settings: Settings, budget: int) -> Settings:
    """The row's settings with what the search finds."""
    axes = searched(settings["method"])
    start = {axis.name: START[axis.name] for axis in axes}
    found = compass(lambda point: recorded.loss(settings | point, SEARCHED), start, axes, budget)
    recorded.choose(name, settings | found)
    return settings | found


def tune_all(recorded: Recorded, rows: dict[str, Settings], budget: int, seeds: tuple[int, ...]) -> None:
    """Searches for all rows at once, and runs what was found on all seeds."""

    def row(name: str) -> None:
        for future in recorded.start_all(tune(recorded, name, rows[name], budget), seeds):
            future.result()

    with ThreadPoolExecutor(len(rows)) as threads:
        list(threads.map(row, rows))


def main(options: Options) -> None:
    with Recorded("frontier", common(options)) as recorded:
        tune_all(recorded, ROWS, options.budget, options.seeds)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
