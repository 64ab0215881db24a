"""Is AdamW or Muon the better inner optimizer, method by method?
Makes the runs with Muon, tuned by frontier's search; the baseline is frontier's own runs with AdamW, which had more
runs to be tuned with. Takes about an hour on two cores, after frontier.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.lib.runs import Runs, around, changes
from bench.lib.search import tune_all
from bench.lib.store import Store
from bench.lib.table import Part, Table
from bench.quality import frontier

NAMES = (
    *("ddp", "diloco, every 20", "streaming-diloco, every 20", "dilocox, every 20", "sparseloco, every 5"),
    *("noloco, every 5", "noloco, every 20", "nolocox, every 20", "local"),
)
"""Rows of the frontier that are made with Muon, too."""


@dataclass(frozen=True)
class Options(frontier.Options):
    budget: int = 4
    """Runs that the search of each row may make: two fewer than AdamW's, since Muon's steps take twice as long here."""
    rows: tuple[str, ...] = NAMES
    """Which rows to make."""


SMOKE = Options(steps=2, replicas=2, budget=1, seeds=(0,), rows=("diloco, every 20",))


def run(options: Options, store: Store) -> list[Part]:
    rows = {name: frontier.ROWS[name] | {"inner": "muon"} for name in options.rows}
    with Runs(store, options.regime) as runs:
        tune_all(runs, rows, options.budget, options.seeds)
    return tables(store, options)["inner"]


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """Muon beside frontier's AdamW."""
    adamw = {row.name: row for row in frontier.rows_of(Store("frontier"), frontier.Options())}
    lines = []
    for name in NAMES:
        if name not in store.chosen or name not in adamw:
            continue
        muon = store.results(options.regime | store.chosen[name])
        change = changes(muon, adamw[name].results)
        rates = (adamw[name].settings["lr"], store.chosen[name]["lr"])
        lines.append(
            (
                name,
                around(adamw[name].losses),
                around(result["validation_loss"] for result in muon.values()),
                f"{around(change, 1, '+')} %",
                "Muon" if max(change) < 0 else "AdamW" if min(change) > 0 else "neither on all seeds",
                f"{rates[0]:g}, {rates[1]:g}",
            )
        )
    columns = ("method", "AdamW", "Muon", "change", "better on all seeds", "lr of each")
    return {"inner": [Table(dict.fromkeys(columns, ""), lines)]}
