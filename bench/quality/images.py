"""Can one read the letters that replicas have learnt to draw, and how far are they from real ones?
Trains one U-Net by flow matching on letters of this machine's fonts, with NoLoCo, DiLoCo and ddp, and keeps a grid of
what each draws, a column for each letter. The Frechet distance is on features of a small classifier of the same
letters; that of letters that were trained on to those held out is what no network need fall below. Takes about half
an hour on one core.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import simulate
from farflung.settings import Settings as RunSettings
from farflung.workloads.images.workload import FRECHET, Images

METHODS = ("noloco", "diloco", "ddp")


@dataclass(frozen=True)
class Options:
    steps: int = 300
    """Inner steps of each replica."""
    every: int = 10
    """Inner steps between rounds."""
    replicas: int = 4
    """Copies of the model."""
    letters: str = "AEHKSX"
    """What to draw."""
    resize: int = 16
    """Pixels of a letter's side."""
    width: int = 16
    """Channels of the U-Net."""
    batch_size: int = 32
    """Pictures in one inner step of one replica."""
    drawn_pictures: int = 96
    """Letters drawn for the Frechet distance."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each method for each."""


SMOKE = Options(
    seeds=(0,), steps=2, every=1, replicas=2, letters="AO", resize=8, width=8, batch_size=4, drawn_pictures=40
)


def common(options: Options) -> Settings:
    """Of all runs."""
    asked = {key: value for key, value in vars(options).items() if key not in ("every", "seeds")}
    schedule = {"warmup": options.steps // 8, "eval_every": options.steps, "checkpoint_every": 0}
    return {"workload": "images", "inner": "adamw", "lr": 4e-3, **asked, **schedule}


def made(settings: Settings, seed: int, grid: Path) -> Result:
    """What a run comes to; its grid is written to a file."""
    with tempfile.TemporaryDirectory() as scratch:
        summary = simulate(Path(scratch) / "run", **settings, seed=seed).summary
    grid.parent.mkdir(exist_ok=True)
    grid.write_bytes(base64.b64decode(summary["sample_picture"]))
    kept = ("validation_loss", "validation_loss_averaged", "bytes_sent", "parameters", "epochs")
    return {**{key: summary[key] for key in kept}, "frechet": summary["others_averaged"][FRECHET]}


def real_letters(options: Options) -> float:
    """The Frechet distance of as many letters that were trained on to those held out."""
    images = Images(RunSettings.of(**common(options)).workload)
    some = torch.linspace(0, images.available - 1, options.drawn_pictures).long()
    return images.distance(images.training.at(some).values())


def run(options: Options, store: Store) -> Iterator[Part]:
    def row(method: str) -> tuple[Cell, ...]:
        settings = common(options) | {"method": method} | ({} if method == "ddp" else {"every": options.every})
        grids = [store.path.with_name(f"images-{method}-{seed}.png") for seed in options.seeds]
        found = [
            store.once(settings, seed, partial(made, settings, seed, grid))
            for seed, grid in zip(options.seeds, grids, strict=True)
        ]
        figures = (mean(result[key] for result in found) for key in ("validation_loss_averaged", "frechet"))
        return method, *figures, mean(result["bytes_sent"] for result in found) / 1e6, grids[0].name

    columns = {"": "", "validation loss": ".4f", FRECHET: ".2f", "MB sent": ".1f", "grid": ""}
    title = f"{options.replicas} replicas, {options.steps} steps, every={options.every}, {len(options.letters)} letters"
    yield Table(columns, map(row, METHODS), f"{title}; weights averaged; grids lie beside the results")
    yield f"letters trained on, to those held out: {FRECHET} {real_letters(options):.2f}"
