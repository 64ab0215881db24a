"""Loss against bytes for all methods: 8 replicas, learning rates of all tuned by one search with one budget.

    python bench/frontier.py [--steps 200] [--budget 6] [--seeds 0 1 2]

Tuned on the first seed. Results go to bench/results/frontier.json; bench/evidence.py makes tables and plots of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro
from recorded import Recorded, Settings, regime
from search import tune_all


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
    """One run of each tuned row for each; the search uses the first."""


WITH_ADAMW: dict[str, Settings] = {
    "ddp": {"method": "ddp"},
    "dynamic-threshold": {"method": "dynamic-threshold"},
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

ROWS: dict[str, Settings] = {
    **{name: {**settings, "inner": "adamw"} for name, settings in WITH_ADAMW.items()},
    "demo": {"method": "demo", "inner": "sign"},
}
"""All rows, with the inner optimizers that the methods were published with."""


def main(options: Options) -> None:
    with Recorded("frontier", regime(options.steps, options.model, options.replicas)) as recorded:
        tune_all(recorded, ROWS, options.budget, options.seeds)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
