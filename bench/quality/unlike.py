"""What do replicas of unlike data learn of each other, and what are averaging, RDA and NoLoCo's pull worth there?
Eight hidden sources (Markov chains), a replica each that sees no other; all are judged on all sources. The baselines
are ddp, in which each step is of all sources, and replicas that never meet. Learning rates are of one search with one
budget; what is told is by how much a loss is above the source's entropy. Takes about an hour on two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from bench.lib.runs import Runs, around, in_words
from bench.lib.search import AXES, WITH_MUON, tune_all
from bench.lib.sources import sources
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import simulate
from farflung.files import typed
from farflung.outer import DivergedError
from farflung.workloads.store import write_sequences
from farflung.workloads.tokenizers import Bytes

WAYS: dict[str, Settings] = {
    "ddp": {"method": "ddp"},
    "diloco": {"method": "diloco"},
    "diloco, RDA": {"method": "diloco", "fuse": "rda"},
    "noloco": {"method": "noloco"},
    "noloco, half the pull": {"method": "noloco", "gamma": 0.35},
    "noloco, no pull": {"method": "noloco", "gamma": 0.0},
    "gasloc": {"method": "gasloc"},
    "local": {"method": "local"},
}
OF_SOURCES = "validation_losses"
"""What a summary calls the losses by source."""
JUDGED = 64
"""Sequences of each source that all are judged by."""
LENGTH = 32
"""Tokens in a sequence."""


@dataclass(frozen=True)
class Options:
    sources: int = 8
    """Sources, and replicas."""
    steps: int = 800
    """Inner steps of each replica."""
    every: int = 10
    """Inner steps between rounds."""
    batch_size: int = 8
    """Sequences in an inner step."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the sources and the runs; the search uses the first."""
    budget: int = 3
    """Runs that the search of each learning rate may make."""
    model: str = "micro"
    """What is trained."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Which rows to make."""


SMOKE = Options(sources=2, steps=4, every=2, batch_size=2, seeds=(0,), budget=1, ways=("diloco, RDA",))


def run(options: Options, store: Store) -> Iterator[Part]:
    rounds = {way: {} if WAYS[way]["method"] in ("ddp", "local") else {"every": options.every} for way in options.ways}
    rows = {way: WAYS[way] | rounds[way] for way in options.ways}
    with Runs(store, regime(options), made) as runs:
        tune_all(runs, rows, options.budget, options.seeds, AXES[:1], WITH_MUON)
    for parts in tables(store, options).values():
        yield from parts


def regime(options: Options) -> Settings:
    """What all rows have in common."""
    return {
        "model": options.model,
        "tokenizer": "bytes",
        "inner": "muon",
        "shares": "apart",
        "replicas": options.sources,
        "steps": options.steps,
        "batch_size": options.batch_size,
        "sequence_length": LENGTH,
        "eval_every": options.steps,
        "log_every": options.steps,
    }


def tables(store: Store, options: Options) -> dict[str, list[Part]]:
    """How far each way is above the sources' entropies, of runs that have not diverged; and source by source."""
    chosen = {way: store.chosen[way] for way in options.ways if way in store.chosen}
    found = {
        way: {seed: one for seed, one in store.results(regime(options) | settings).items() if "above" in one}
        for way, settings in chosen.items()
    }
    lines = [line(way, chosen[way], [*results.values()]) for way, results in found.items() if results]
    title = (
        f"{options.sources} replicas, each with a source of its own; rounds every {options.every} of {options.steps} "
        "steps; nats a token above the source's entropy"
    )
    columns = {"": "", "replicas": "", "best source": ".4f", "worst source": ".4f", "averaged": "", "tuned to": ""}
    first = options.seeds[0]
    each = [(way, *results[first]["above"]) for way, results in found.items() if first in results]
    sources = {"": "", **{f"source {number}": ".4f" for number in range(options.sources)}}
    return {
        "unlike": [Table(columns, lines, title)],
        "unlike sources": [Table(sources, each, f"each source, seed {first}")],
    }


def line(way: str, settings: Settings, results: list[Result]) -> tuple[Cell, ...]:
    """A row: the replicas' mean over the sources, on the best and the worst of these, and that of averaged weights."""
    above = [sorted(result["above"]) for result in results]
    ends = (mean(one[place] for one in above) for place in (0, -1))
    averaged = around((result["averaged"] for result in results), 4)
    return way, around(map(mean, above), 4), *ends, averaged, in_words({"lr": settings["lr"]})


def made(settings: Settings, seed: int) -> Result:
    """One run: how far the replicas' mean losses are above the sources' entropies, and the mean weights' loss."""
    count, samples = settings["replicas"], settings["steps"] * settings["batch_size"]
    found = sources(count, (samples + JUDGED) * LENGTH, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [source.text[: (samples + JUDGED) * LENGTH].reshape(-1, LENGTH) for source in found]
        write_sequences(folder / "all", [each[JUDGED:] for each in rows], np.empty((0, LENGTH), np.uint8), Bytes())
        judges = [folder / f"source-{number:02}" for number in range(count)]
        for judge, each in zip(judges, rows, strict=True):
            write_sequences(judge, [each[:JUDGED]], np.empty((0, LENGTH), np.uint8), Bytes())
        given = {
            "data": str(typed(folder / "all")),
            "validation": " + ".join(f"{1 / count}*{typed(judge)}" for judge in judges),
            "eval_sequences": count * JUDGED,
            "seed": seed,
            "checkpoint_every": 0,
        }
        try:
            summary = simulate(folder / "run", **settings | given).summary
        except DivergedError:
            return {"validation_loss": None}
    losses, floor = summary[OF_SOURCES], mean(source.entropy for source in found)
    return {
        "validation_loss": summary["validation_loss"],
        "above": [losses[key] - source.entropy for key, source in zip(sorted(losses), found, strict=True)],
        "averaged": summary["validation_loss_averaged"] - floor,
    }
