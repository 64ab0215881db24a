"""AdamW against Muon as the inner optimizer under each method, tuned by the search of bench/frontier.py.

    python bench/inner.py [--steps 200] [--budget 4] [--seeds 0 1 2]

Makes the runs with Muon; those with AdamW are bench/frontier.py's, which had more runs to be tuned with. Results go to
bench/results/inner.json.
"""

from __future__ import annotations

from dataclasses import dataclass

import frontier
import tyro
from recorded import Recorded, regime
from search import tune_all

NAMES = (
    *("ddp", "diloco, every 20", "streaming-diloco, every 20", "dilocox, every 20", "sparseloco, every 5"),
    *("noloco, every 5", "noloco, every 20", "nolocox, every 20", "local"),
)
"""Rows of the frontier that are made with Muon, too."""


@dataclass(frozen=True)
class Options(frontier.Options):
    budget: int = 4
    """Runs that the search of each row may make: two fewer than AdamW's, since Muon's steps take twice as long here."""


def main(options: Options) -> None:
    rows = {name: frontier.ROWS[name] | {"inner": "muon"} for name in NAMES}
    with Recorded("inner", regime(options.steps, options.model, options.replicas)) as recorded:
        tune_all(recorded, rows, options.budget, options.seeds)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
