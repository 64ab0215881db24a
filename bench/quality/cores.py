"""Does a core gain from the whole model, and the whole from weak replicas that train the core alone?
One joint run beside two separate ones of the same steps in all; then two strong replicas with six weak ones, beside the
two alone and eight weak ones alone. Steps of a strong replica are of the core and of all in turn, so that it sees the
whole model in every second one. Takes about fifteen minutes on two cores at 400 steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from bench.lib.runs import around
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import simulate
from farflung.events import RoundEvent, StartEvent


@dataclass(frozen=True)
class Options:
    steps: int = 400
    """Of the core, and as many of all: a joint run has both, in turn."""
    every: int = 20
    """Inner steps between rounds."""
    strong: int = 2
    """Replicas that have all of the model."""
    weak: int = 6
    """Replicas that have the core only."""
    core: str = "lowrank8"
    """What that is."""
    method: str = "noloco"
    """How replicas exchange."""
    seeds: tuple[int, ...] = (0,)
    """One run of each row for each."""


SMOKE = Options(steps=2, every=2, strong=1, weak=1)


def rows(options: Options) -> dict[str, Settings]:
    """The runs by name."""
    one, core = {"replicas": 1, "method": "local"}, {"core": options.core}
    many = {**core, "method": options.method, "every": options.every, "steps": 2 * options.steps}
    strong, weak = options.strong, options.weak
    return {
        "one replica, joint": {**one, **core, "steps": 2 * options.steps},
        "one replica, all of the model": {**one, "steps": options.steps},
        "one replica, the core alone": {**one, **core, "core_only_replicas": 1, "steps": options.steps},
        "one replica, the core alone, all steps": {**one, **core, "core_only_replicas": 1, "steps": 2 * options.steps},
        f"{strong} strong, {weak} weak": {**many, "replicas": strong + weak, "core_only_replicas": weak},
        f"{strong} strong": {**many, "replicas": strong},
        f"{strong + weak} weak": {**many, "replicas": strong + weak, "core_only_replicas": strong + weak},
        f"{strong} strong, {weak} weak, the rest every 4th round": {
            **many,
            "replicas": strong + weak,
            "core_only_replicas": weak,
            "rest_every": 4,
        },
    }


def outcome(row: Settings, seed: int) -> Result:
    """The losses of the whole and of the core, and what the first and the last replica train and send in a round."""
    common: dict[str, Any] = {
        "model": "micro",
        "tokenizer": "bytes",
        "inner": "adamw",
        "batch_size": 8,
        "sequence_length": 32,
        "max_tokens": 4_000_000,
        "eval_sequences": 128,
        "checkpoint_every": 0,
        "eval_every": row["steps"],
        "log_every": row["steps"],
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as name:
        finished = simulate(Path(name) / "run", **common | row)
    run, summary, last = finished.run, finished.summary, row["replicas"] - 1
    sent = [[event.bytes_sent for event in run.of(replica, RoundEvent)] for replica in (0, last)]
    loss, alone = summary["validation_loss_averaged"], row.get("core_only_replicas", 0) == row["replicas"]
    return {
        "whole": None if alone else loss,
        "core": loss if alone else summary.get("others_averaged", {}).get("core"),
        "values": [run.of(replica, StartEvent)[0].own_parameters for replica in (0, last)],
        "bytes": [sum(each) / (row["steps"] // row.get("every", row["steps"])) for each in sent],
    }


def run(options: Options, store: Store) -> Iterator[Part]:
    def line(name: str, row: Settings) -> tuple[Cell, ...]:
        found = [store.once(row | {"row": name}, seed, partial(outcome, row, seed)) for seed in options.seeds]
        whole, core = (
            around((one[part] for one in found), digits=4) if found[0][part] is not None else None
            for part in ("whole", "core")
        )
        sent = [mean(one["bytes"][place] for one in found) for place in (0, 1)]
        return name, whole, core, found[0]["values"][0], found[0]["values"][1], *sent

    columns = {
        "": "",
        "loss, whole": "",
        "loss, core": "",
        "values, first": ",.0f",
        "values, last": ",.0f",
        "bytes a round, first": ",.0f",
        "bytes a round, last": ",.0f",
    }
    title = (
        f"core {options.core}, {options.method}, every={options.every}, {options.steps} steps of the core and as many "
        "of all; the loss of the averaged weights, in nats a byte; of the first replica and the last one"
    )
    yield Table(columns, [line(name, row) for name, row in rows(options).items()], title)
