"""What makes parts that are dealt out as good as a narrow model: two holders of each unit, or a mask of updates alone?
IST of heads and FFN columns as `subnets` measures it, in a plain loop that farflung does not have, beside narrow models
of the memory that a replica's gradients and moments take, with weights averaged as often: the baseline. Takes twenty
minutes on two cores at 400 steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.lib import masked
from bench.lib.masked import Way
from bench.lib.runs import Runs, around
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.quality import subnets
from farflung.subnets.units import heads_and_columns
from farflung.workloads import Language
from farflung.workloads.dealing import Deal
from farflung.workloads.settings import LanguageSettings

WAYS = {
    "one holder, as ist": Way(),
    "two holders": Way(holders=2),
    "one holder, updates alone masked": Way(forward_masked=False),
    "two holders, updates alone masked": Way(2, forward_masked=False),
}
BATCH = 8
"""Sequences in a step of a replica."""


Options = subnets.Options
SMOKE = Options(steps=4, every=2, replicas=2, layers=2)


def outcome(options: Options, settings: Settings, seed: int) -> Result:
    """A narrow model's, or a way's."""
    torch.set_num_threads(1)
    if "part" in settings:
        return subnets.outcome(options, {**subnets.AVERAGED, "part": settings["part"]}, seed)
    with tempfile.TemporaryDirectory() as name:
        model = subnets.model_of(options, Path(name), 1)
        told = LanguageSettings(
            model=model, tokenizer="bytes", sequence_length=32, max_tokens=4_000_000, eval_sequences=128
        )
        workload = Language(told, Deal(options.replicas))

        def loss(one: Any, replica: int, step: int) -> Tensor:
            return workload.loss(one, workload.batch(workload.sample_ids(seed, replica, step, BATCH)))

        def judge(one: Any) -> float:
            with torch.no_grad():
                return workload.evaluate(one, BATCH, torch.device("cpu")).value

        whole = workload.build(seed)
        shape = options.replicas, options.steps, options.every
        way = WAYS[settings["way"]]
        found, scale = masked.train(whole, heads_and_columns(whole), way, shape, loss, judge, seed)
        return {"loss": found, "scale": scale}


def run(options: Options, store: Store) -> Iterator[Part]:
    common = {name: value for name, value in vars(options).items() if name != "seeds"}
    rows: dict[str, Settings] = {f"narrow model, 1/{part}": {"part": part} for part in (options.replicas, 2)}
    rows |= {name: {"way": name} for name in WAYS}
    with Runs(store, common, partial(outcome, options)) as runs:
        futures = {name: runs.start_all(row, options.seeds) for name, row in rows.items()}

        def line(name: str) -> tuple[Cell, ...]:
            found = [future.result() for future in futures[name]]
            return name, around((one["loss"] for one in found), digits=4), found[0]["scale"]

        title = f"{options.replicas} replicas, {options.steps} steps, every={options.every}; nats a byte"
        yield Table({"": "", "loss": "", "scale": ".3f"}, map(line, rows), title)
