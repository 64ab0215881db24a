"""What `farflung recommend` goes by: the gaps to ddp that benches have measured, as a small table in the package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from bench.lib.runs import changes
from bench.lib.store import ROOT, Result, Settings, Store
from bench.quality import frontier, gap, inner, length, long_frontier, long_scaling
from farflung.files import write_text

TABLE = ROOT / "farflung" / "planner" / "evidence.json"

OF_ROUNDS = ("method", "every", "every_final", "codec", "fragments", "delay", "adapt")
"""Settings that say what a row is; learning rates are tuned to the model."""

BY_STEP = ("inner learning rate", "rounds that grow rarer, or more frequent")
"""The rows of the gap that are worth taking."""


def made() -> dict[str, Any]:
    """The table: each row's settings of rounds, and by how many per cent its loss is above ddp's, seed by seed."""
    options, of_inner, found = inner.Options(), Store("inner"), gap.Found(Store("gap"), gap.Options())
    results = {name: of_inner.results(options.regime | of_inner.chosen[name]) for name in inner.NAMES}
    rows = [
        _row("The inner optimizer", of_inner.chosen[name], changes(results[name], results["ddp"]))
        for name in inner.NAMES
        if name != "local"
    ]
    chosen, title = found.store.chosen, "The gap to synchronous training"
    ddp = found.of(chosen["ddp, Muon"])
    rows += [_row(title, chosen[name], changes(found.of(chosen[name]), ddp)) for name in BY_STEP]
    rows.append(_with_modulo(results))
    return {
        "parameters": next(iter(results["ddp"].values()))["parameters"],
        "steps": options.regime["steps"],
        "replicas": options.regime["replicas"],
        "alone": changes(results["local"], results["ddp"]),
        "doubling": _of_a_doubling(),
        "longer": _longer(),
        "rows": rows,
    }


def write() -> None:
    """Makes the package's table anew."""
    table = made()
    rows = {key: ",\n".join(f"  {json.dumps(row)}" for row in table.pop(key)) for key in ("longer", "rows")}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    text = ",\n".join([*lines, *(f"{json.dumps(key)}: [\n{each}\n]" for key, each in rows.items())])
    write_text(TABLE, f"{{{text}}}\n")


def _row(table: str, settings: Settings, gaps: list[float]) -> dict[str, Any]:
    told = {key: settings[key] for key in OF_ROUNDS if key in settings}
    return {"table": table, "settings": told, "gaps": [round(one, 3) for one in gaps]}


def _with_modulo(results: dict[str, dict[int, Result]]) -> dict[str, Any]:
    """NoLoCo's gap with Muon, and what its codec changed of the loss with AdamW."""
    store, options = Store("frontier"), frontier.Options()
    names = "noloco, every 5", "noloco, every 5, modulo4"
    plain, coded = (store.results(options.regime | store.chosen[name]) for name in names)
    both = zip(changes(results["noloco, every 5"], results["ddp"]), changes(coded, plain), strict=True)
    return _row("Loss against bytes", store.chosen["noloco, every 5, modulo4"], [sum(pair) for pair in both])


def _of_a_doubling() -> dict[str, list[float]]:
    """By how many points gaps grow where replicas are twice as many: the least and most of two methods, by length."""
    store, options = Store("long_scaling"), long_scaling.Options()
    gaps = {
        steps: [long_scaling.gaps_of(store, options, way, steps) for way in ("diloco", "noloco")]
        for steps in options.steps
    }
    return {str(steps): sorted(round(one.line(one.points)[1], 2) for one in both) for steps, both in gaps.items()}


def _longer() -> list[dict[str, Any]]:
    """The rows of longer runs, with their gaps at each length, also where that is of one seed."""
    store, options = Store("length"), length.Options()
    found = length.measured(store, options)
    rows = [
        (steps, _row("Longer runs", options.of(way, steps), changes(results, found[length.DDP, steps])))
        for (way, steps), results in found.items()
        if way != length.DDP
    ]
    return _by_length([*rows, *_of_all_methods()])


def _of_all_methods() -> Iterator[tuple[int, dict[str, Any]]]:
    """Lengths and rows of the frontier in longer runs that have several seeds."""
    store, options = Store("long_frontier"), long_frontier.Options()
    for steps in options.steps:
        rows = long_frontier.rows_of(store, options, steps)
        for name, gaps in long_frontier.gaps_of(rows).items():
            if name not in ("ddp", "local") and len(gaps) > 1:
                yield steps, _row("All methods at length", rows[name].settings, gaps)


def _by_length(measured: Iterable[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of one setting each, whose gaps are by length."""
    rows = dict[str, dict[str, Any]]()
    for steps, row in measured:
        rows.setdefault(repr(row["settings"]), row | {"gaps": {}})["gaps"][str(steps)] = row["gaps"]
    return list(rows.values())
