"""Pictures whose colours nobody takes for each other, and a mixture of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_files

from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.settings import PictureSplitSettings
from farflung.mixtures.pictures.split import split

EACH, SIDE = 60, 8


def write_pictures(folder: Path, classes: int = 3) -> Path:
    """Pictures of so many classes; their folder."""
    return own_files.write_pictures(folder / "pictures", classes, EACH, SIDE)


def split_settings(pictures: Path, **changed: Any) -> PictureSplitSettings:
    small = {"experts": 3, "router_width": 8, "router_steps": 60, "batch_size": 32, "features": "pixels"}
    return PictureSplitSettings(**{"data": str(pictures), "out": pictures.parent / "mix", **small, **changed})


def make(folder: Path, **changed: Any) -> PictureSplit:
    return split(split_settings(write_pictures(folder), **changed), lambda _: None)


def expert(mixture: PictureSplit, number: int, folder: Path) -> Path:
    """An expert as it is before training, exported."""
    images = mixture.part(number)
    images.export(images.build(number).state_dict(), folder, number)
    return folder
