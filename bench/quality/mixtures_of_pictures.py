"""Is a mixture of networks that draw better than one of their size, and does it matter how pictures are split?
Letters of this machine's fonts, split by k-means, or by chance, among as many experts; one model sees as many pictures
as all experts together, in as many operations. Once networks are told which letter to draw, and once they are not; then
k-means sees pixels alone. A student learns from all experts. A grid of what each draws from the same noise lies beside
the results. Takes about an hour on two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.lib.runs import around
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Part, Table
from bench.lib.training import simulate
from farflung.mixtures.pictures import router
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.joined import join, joined, judged, loaded, ways
from farflung.mixtures.pictures.settings import PictureSplitSettings
from farflung.mixtures.pictures.split import split, write
from farflung.training.export import export
from farflung.workloads.images.folder import write_part
from farflung.workloads.images.pictures import Pictures
from farflung.workloads.images.pictures import grid as side_by_side
from farflung.workloads.images.settings import ImagesSettings
from farflung.workloads.images.workload import FRECHET, Images

STUDENT = "farflung.mixtures.pictures.student:Student"


@dataclass(frozen=True)
class Options:
    letters: str = "ABEHKOSX"
    """What to draw; there are as many experts."""
    told: tuple[bool, ...] = (True, False)
    """Whether networks are told which letter to draw."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the split and of the runs."""
    steps: int = 400
    """Inner steps of each network."""
    batch_size: int = 64
    """Pictures in one step of one model; an expert has its share of them."""
    resize: int = 8
    """Pixels of a letter's side."""
    width: int = 8
    """Channels of all networks that draw."""
    lr: float = 4e-3
    """Of all networks."""
    router_steps: int = 1000
    """Of the router, in batches of 64."""
    router_width: int = 16
    """Its channels: one of 8 does not know small parts of pixels."""
    all_above: float = 0.5
    """The share of noise above which all experts work, in one of the ways."""
    drawn_pictures: int = 96
    """Letters drawn for the Frechet distance."""


SMOKE = Options(
    "AO", told=(False,), seeds=(0,), steps=2, batch_size=8, router_steps=100, router_width=8, drawn_pictures=0
)


def run(options: Options, store: Store) -> Iterator[Part]:
    for told in options.told:
        settings = {name: value for name, value in vars(options).items() if name not in ("told", "seeds")}
        name = f"{store.path.stem}-{'told' if told else 'not-told'}"
        grids = [store.path.with_name(f"{name}-{seed}.png") for seed in options.seeds]
        found = [
            store.once({**settings, "told": told}, seed, partial(made, options, told, seed, grid))
            for seed, grid in zip(options.seeds, grids, strict=True)
        ]
        kinds = ["losses", "distances"][: 1 + bool(found[0]["distances"])]  # without classes, there is no distance
        lines = [(way, *(around(one[kind][way] for one in found) for kind in kinds)) for way in found[0]["losses"]]
        title = f"{len(options.letters)} letters, {'told which' if told else 'not told which'}, {options.steps} steps"
        yield Table(dict.fromkeys(["", "held-out loss", FRECHET][: 1 + len(kinds)], ""), lines, title)
        yield f"{', '.join(grid.name for grid in grids)}: a column for each, in this order"


def made(options: Options, told: bool, seed: int, grid: Path) -> Result:
    """What all come to on the same pictures held out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = _settings(options, told, seed, folder)
        mix, by_chance = split(settings, lambda _: None), _by_chance(replace(settings, out=folder / "by chance"))
        experts = _experts(options, mix, seed)
        join(mix, experts, folder / "joined")
        whole = partial(_trained, options, data=mix.folder, batch_size=options.batch_size, seed=seed)
        one = whole(folder / "one")
        student = whole(folder / "student", workload=STUDENT, teacher=str(folder / "joined"))
        judge, more = mix.whole(options.drawn_pictures), (2, options.all_above)
        by_chances = joined(by_chance, _experts(options, by_chance, seed))
        models = {
            "one model": loaded(one, judge.form),
            **dict(ways(joined(mix, experts), *more)),
            **{f"split by chance, {way}": model for way, model in ways(by_chances, *more)},
            "student": loaded(student, judge.form),
        }
        found = {name: judged(judge, model) for name, model in models.items()}
    grid.parent.mkdir(exist_ok=True)
    grid.write_bytes(side_by_side(torch.stack([column for _, column in found.values()], dim=1)))
    losses = {name: score.value for name, (score, _) in found.items()}
    distances = {name: score.others[FRECHET] for name, (score, _) in found.items() if score.others}
    return {"losses": losses, "distances": distances}


def _settings(options: Options, told: bool, seed: int, folder: Path) -> PictureSplitSettings:
    """How to split letters, which are written into a folder: each a class, or all one."""
    glyphs = Images(ImagesSettings(letters=options.letters, resize=options.resize, eval_pictures=1 << 62))
    pixels, labels = map(torch.cat, zip(glyphs.training, glyphs.held_out, strict=True))
    some = Pictures(pixels, labels if told else torch.zeros_like(labels))
    write_part(folder / "letters", glyphs.form.classes if told else ["letters"], some)
    return PictureSplitSettings(
        data=str(folder / "letters"),
        out=folder / "mix",
        experts=len(options.letters),
        router_width=options.router_width,
        router_steps=options.router_steps,
        seed=seed,
    )


def _by_chance(settings: PictureSplitSettings) -> PictureSplit:
    """A split into parts that have nothing of their own, so that no router can learn to tell them apart."""
    images, random = Images(settings.pictures), torch.Generator().manual_seed(settings.seed)
    training, held_out = (
        (some, torch.randperm(len(some.labels), generator=random) % settings.experts)
        for some in (images.training, images.held_out)
    )
    model = router.trained(settings, images.form, *training, lambda _: None)
    return write(settings, images.form, training, held_out, model)


def _experts(options: Options, mix: PictureSplit, seed: int) -> dict[int, Path]:
    share = options.batch_size // mix.experts
    each = partial(_trained, options, batch_size=share, seed=seed)
    return {number: each(mix.run(number), data=mix.store(number)) for number in range(mix.experts)}


def _trained(options: Options, folder: Path, data: Path, batch_size: int, seed: int, **more: Any) -> Path:
    """A network, exported."""
    common: Settings = {"workload": "images", "replicas": 1, "method": "local", "inner": "adamw", "lr": options.lr}
    once = {"eval_every": options.steps, "log_every": options.steps, "checkpoint_every": 0, "drawn_pictures": 0}
    sizes = {"steps": options.steps, "warmup": options.steps // 20, "width": options.width, "batch_size": batch_size}
    run = folder.with_name(f"{folder.name} run")
    simulate(run, **{**common, **once, **sizes, "data": str(data), "seed": seed, **more})
    export(run, folder)
    return folder
