"""The experts of a mixture of pictures together: what they come to, what they draw, and one folder of them all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from farflung.errors import UserError
from farflung.files import write_text
from farflung.mixtures.folder import COPY_AGAIN, damaged
from farflung.mixtures.pictures import modeling, router
from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.modeling import PictureMixture
from farflung.workloads.base import Score
from farflung.workloads.images import exported, network
from farflung.workloads.images.pictures import Form, grid
from farflung.workloads.images.workload import Images

BATCH = 64
"""Pictures that are judged, and drawn, at once."""
CLASSES, NOISES = 32, 16
"""Rows of a grid, at most: one for each class, or one for each noise where there is one class."""
CPU = torch.device("cpu")
UNREADABLE = (OSError, ValueError, AttributeError, TypeError, SafetensorError)
"""What libraries raise where a folder holds no network, or a damaged one."""
ONE_CLASS_ABOVE = 0.5
"""The share of noise above which all experts draw pictures that have no class: there, it may be of any part."""


@dataclass(frozen=True)
class PictureScore:
    """What a mixture comes to on the pictures held out."""

    ways: dict[str, Score]
    """By which experts work on a picture; `dense` is one model."""
    own: dict[int, float]
    """The loss of each expert on its own part."""
    instead: int
    """How many of the pictures are of missing experts, as the router sees them without noise."""
    grid: bytes
    """A PNG file: a column for each way, of pictures from the same noise in each row."""


def evaluate(
    split: PictureSplit, experts: Mapping[int, Path], dense: Path | None, *, top: int, all_above: float, drawn: int
) -> PictureScore:
    """Judges a mixture by all pictures held out, with the noise that one model is judged with.

    Args:
        experts: the exported networks that there are, by number; the pictures of others go to the next best.
        dense: one exported network to judge by the same pictures.
        top: how many experts work on a picture, in one of the ways beside one and all.
        all_above: the share of noise above which all do, in another.
        drawn: pictures for the Frechet distance; 0 leaves it out.

    Raises UserError: there is no expert; one draws other pictures; pictures are missing.
    """
    whole, mixture = split.whole(drawn), joined(split, experts)
    split.refuse_others(whole)
    scores, columns = {}, []
    own = {
        number: _loss(split.part(number), expert)
        for number, expert in zip(mixture.numbers, mixture.experts, strict=True)
    }
    one = [("dense", loaded(dense, whole.form))] if dense else []
    for name, model in (*one, *ways(mixture, top, all_above)):
        scores[name], column = judged(whole, model)
        columns.append(column)
    return PictureScore(scores, own, _instead(mixture, whole), grid(torch.stack(columns, dim=1)))


@torch.no_grad()
def judged(whole: Images, model: Any) -> tuple[Score, Tensor]:
    """What a network comes to, and a column of what it draws: a picture of each class, or of each of some noises."""
    classes = len(whole.form.classes)
    labels = torch.arange(min(classes, CLASSES)) if classes > 1 else torch.zeros(NOISES, dtype=torch.int64)
    return whole.evaluate(model, BATCH, CPU), network.draw(model, labels, whole.form, 0, BATCH)


def ways(mixture: PictureMixture, top: int, all_above: float) -> Iterator[tuple[str, PictureMixture]]:
    """A mixture with one expert at work, with some, with all, and with all above a share of noise, by name."""
    experts = len(mixture.numbers)
    found = {f"top {number}": (number, 1.0) for number in sorted({1, min(top, experts)})}
    found |= {"all": (experts, 1.0), f"all above {all_above:g}, then one": (1, all_above)}
    for name, way in found.items():
        yield name, PictureMixture(mixture.router, dict(zip(mixture.numbers, mixture.experts, strict=True)), *way)


def joined(split: PictureSplit, experts: Mapping[int, Path]) -> PictureMixture:
    """The experts that there are, and the router, in evaluation mode. Raises UserError."""
    if not experts:
        raise UserError(
            f"{split.folder} has no expert that is trained; first: farflung train --workload images "
            f"--data {split.store(0)} --out {split.run(0)}, and so on for each"
        )
    form = split.whole(0).form
    if form.classes != (*split.classes,):
        raise damaged(split.folder, "it has other classes than the pictures")
    parts = {number: loaded(folder, form) for number, folder in experts.items()}
    all_above = 1.0 if len(form.classes) > 1 else ONE_CLASS_ABOVE
    return PictureMixture(_router(split), parts, 1, all_above).eval()


def join(split: PictureSplit, experts: Mapping[int, Path], target: Path) -> None:
    """Writes one folder with the experts that there are, the router, and the class that draws with them.

    Raises UserError: there is no expert; one draws other pictures.
    """
    mixture = joined(split, experts)
    for number, folder in experts.items():
        shutil.copytree(folder, target / f"expert-{number}")
    shutil.copytree(split.router, target / "router")
    shutil.copy(modeling.__file__, target / "mixture.py")
    table = {"experts": mixture.numbers, "top": mixture.top, "all_above": mixture.all_above}
    write_text(target / modeling.TABLE, json.dumps(table))
    write_text(target / exported.CLASSES, json.dumps(split.classes, ensure_ascii=False, indent=1))
    write_text(target / "README.md", README.format(**table | {"experts": len(mixture.numbers)}))


README = """# Networks that draw, and a router

There are {experts} experts, each trained with farflung on its own part of the pictures, by flow matching, and a router
that says of a noisy picture which part it is of. This, run in this folder, draws one picture of each class with
torch and [diffusers](https://huggingface.co/docs/diffusers):

```python
import json
from pathlib import Path

import torch
from mixture import PictureMixture
from PIL import Image

classes = json.loads(Path("classes.json").read_text())
model = PictureMixture.from_pretrained(".")
for name, picture in zip(classes, model.draw(torch.arange(len(classes)), seed=0)):
    pixels = ((picture.clamp(-1, 1) + 1) * 127.5).byte().permute(1, 2, 0).squeeze(-1)
    Image.fromarray(pixels.numpy()).save(f"{{name}}.png")
```

`model.top` experts, {top}, work on a picture; where noise has more than `model.all_above`, {all_above:g}, all do. It is
called as a `UNet2DModel` is: `model(pictures, moments, labels).sample` is the flow.
"""


def loaded(folder: Path, form: Form) -> Any:
    """An exported network that draws pictures of a form. Raises UserError for anything else."""
    try:
        model = _network(folder)
        classes = json.loads((folder / exported.CLASSES).read_text("utf-8"))
        size = model.config.in_channels, *model.config.sample_size
    except UNREADABLE as error:
        raise UserError(
            f"{folder} holds no network that draws; train it on the mixture's own pictures, with "
            "farflung train --workload images"
        ) from error
    if (*classes,) != form.classes or size != form.shape:
        raise UserError(
            f"{folder} draws {'×'.join(map(str, size))} pixels of {len(classes)} classes, and the mixture "
            f"{'×'.join(map(str, form.shape))} of {len(form.classes)}, maybe others; train it on the mixture's own "
            "pictures"
        )
    return model


def _router(split: PictureSplit) -> Any:
    """A mixture's router. Raises UserError where it is not there, damaged, or of another split."""
    try:
        found = _network(split.router)
    except UNREADABLE as error:
        raise UserError(f"{split.router} holds no router that can be read; split the pictures again") from error
    if found.config.out_channels != split.experts:
        raise UserError(f"{split.router} knows {found.config.out_channels} parts, not {split.experts}; {COPY_AGAIN}")
    if not all(weights.isfinite().all() for weights in found.parameters()):
        raise UserError(f"{split.router} has weights that are no finite numbers; {COPY_AGAIN}")
    return found


def _network(folder: Path) -> Any:
    found = network.library().UNet2DModel.from_pretrained(folder, local_files_only=True).eval()
    _refuse_lacking(found)
    return found


def _refuse_lacking(model: torch.nn.Module) -> None:
    """Raises ValueError where weights were not in the files: diffusers then makes places for them, and no values."""
    if lacking := [name for name, weights in model.named_parameters() if weights.is_meta]:
        raise ValueError(f"it lacks weights, such as {lacking[0]}")


def teacher(split: PictureSplit, folder: Path) -> PictureMixture:
    """What was exported of a mixture, with all experts. Raises UserError for what is not, or of another mixture."""
    if not (folder / modeling.TABLE).exists():
        raise UserError(f"teacher {folder}: holds no mixture of pictures; write it with: farflung mixture export")
    try:
        found = PictureMixture.from_pretrained(folder)
        _refuse_lacking(found)
    except (*UNREADABLE, KeyError) as error:
        raise UserError(f"teacher {folder}: is damaged; write it again with: farflung mixture export") from error
    if missing := {*range(split.experts)} - {*found.numbers}:
        raise UserError(
            f"teacher {folder}: expert {min(missing)} is missing, whose part nobody would teach; train it, and "
            "export the mixture again"
        )
    own, told = _router(split).state_dict(), found.router.state_dict()
    if own.keys() != told.keys() or not all(torch.equal(weights, told[name]) for name, weights in own.items()):
        raise UserError(
            f"teacher {folder}: is of another mixture than {split.folder}, whose parts are others; export that one"
        )
    return found


@torch.no_grad()
def _loss(images: Images, model: Any) -> float:
    return images.evaluate(model, BATCH, CPU).value


@torch.no_grad()
def _instead(mixture: PictureMixture, whole: Images) -> int:
    chosen = router.posteriors(mixture.router, whole.held_out, 0.0, 0).argmax(dim=1)
    return int((~torch.isin(chosen, torch.tensor(mixture.numbers))).sum())
