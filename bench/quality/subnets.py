"""What does it cost to train a model of which each replica holds a part, beside a narrow one that fits as well?
Independent subnetworks dealt among all, in pairs and by layers; a narrow model of a part's size, with weights averaged
as often; and DiLoCo on the whole model. The first three have the same memory, work and steps, and only the narrow
model is small at the end. Takes about ten minutes on two cores at 400 steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.lib.runs import around
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import save_llama, simulate
from farflung.events import RoundEvent
from farflung.subnets.units import KINDS
from farflung.training.export import export
from farflung.workloads import Language
from farflung.workloads.dealing import Deal
from farflung.workloads.settings import LanguageSettings

HEADS, HEAD_DIM, COLUMNS = 4, 16, 176

AVERAGED: Settings = {"method": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}


@dataclass(frozen=True)
class Options:
    steps: int = 400
    """Inner steps of each replica."""
    every: int = 20
    """Inner steps between rounds."""
    replicas: int = 4
    """Copies of the model, or parts of it."""
    layers: int = 4
    """Of the decoder, whose hidden states have 64 numbers."""
    seeds: tuple[int, ...] = (0,)
    """One run of each row for each."""


SMOKE = Options(steps=4, every=2, replicas=2, layers=2)


def rows(options: Options) -> dict[str, Settings]:
    """The methods by name; `part`: into how many the width is cut; `whole_first`: steps that train all of it before."""
    return {
        "DiLoCo, whole model": {"method": "diloco"},
        "averaged, whole model": AVERAGED,
        "averaged, narrow model": {**AVERAGED, "part": options.replicas},
        "ist among all": {"method": "ist"},
        "ist in pairs": {"method": "ist", "group_size": 2},
        "resist (layers)": {"method": "resist"},
        "a quarter of the steps whole, then ist": {"method": "ist", "whole_first": options.steps // 4},
    }


def model_of(options: Options, folder: Path, part: int) -> str:
    """A decoder, or one of the same class with a part of its heads and FFN columns."""
    shape = {"hidden_size": HEADS * HEAD_DIM, "head_dim": HEAD_DIM, "num_hidden_layers": options.layers}
    narrow = {"num_attention_heads": HEADS // part, "num_key_value_heads": HEADS // part}
    ends = {"intermediate_size": COLUMNS // part, "tie_word_embeddings": True, "vocab_size": 256}
    return save_llama(folder / f"part-{part}", **shape, **narrow, **ends)


def outcome(options: Options, row: Settings, seed: int) -> Result:
    """The loss of the whole, what each replica trains, and the bytes that it sends in a round."""
    settings = dict(row)
    part, first = settings.pop("part", 1), settings.pop("whole_first", 0)
    common: dict[str, Any] = {
        "replicas": options.replicas,
        "every": options.every,
        "seed": seed,
        "checkpoint_every": 0,
        "batch_size": 8,
        "sequence_length": 32,
        "max_tokens": 4_000_000,
        "eval_sequences": 128,
        "tokenizer": "bytes",
        "inner": "adamw",
        "eval_every": options.steps,
        "log_every": options.steps,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common["model"] = model_of(options, folder, part)
        if first:
            simulate(folder / "first", **common | AVERAGED, steps=first)
            export(folder / "first", folder / "base")
            common |= {"model": str(folder / "base"), "pretrained": True}
        run = simulate(folder / "run", **common, **settings, steps=options.steps - first).run
        assert run.summary
        sent = [event.bytes_sent for event in run.of(0, RoundEvent)][1:]  # with the first one replicas also compare
        return {
            "loss": run.summary["validation_loss_averaged"],
            "values": trained(common["model"], settings["method"], options.replicas),
            "bytes": mean(sent) if sent else 0,
            "scale": run.summary.get("branch_scale"),
        }


def trained(model: str, method: str, replicas: int) -> int:
    """The values of which a replica has gradients and moments."""
    outline = Language(LanguageSettings(model=model, tokenizer="bytes"), Deal(replicas)).outline()
    kinds = {"ist": "heads", "resist": "layers"}
    dealt = {name for pool in KINDS[kinds[method]](outline) for name in pool.cuts} if method in kinds else set()
    sizes = {name: parameter.numel() for name, parameter in outline.named_parameters()}
    return sum(size // replicas if name in dealt else size for name, size in sizes.items())


def run(options: Options, store: Store) -> Iterator[Part]:
    wanted = {name: value for name, value in vars(options).items() if name != "seeds"}

    def line(name: str, row: Settings) -> tuple[Cell, ...]:
        found = [
            store.once(wanted | row | {"row": name}, seed, partial(outcome, options, row, seed))
            for seed in options.seeds
        ]
        scale = median(one["scale"] for one in found) if found[0]["scale"] else None
        losses = around((one["loss"] for one in found), digits=4)
        return name, losses, found[0]["values"], mean(one["bytes"] for one in found), scale

    columns = {"": "", "loss": "", "values trained": ",.0f", "bytes a round": ",.0f", "scale": ".3f"}
    title = (
        f"{options.replicas} replicas, {options.layers} layers of width {HEADS * HEAD_DIM}, {options.steps} steps, "
        f"every={options.every}; the loss of what is exported, in nats a byte; bytes are each replica's"
    )
    yield Table(columns, [line(name, row) for name, row in rows(options).items()], title)
