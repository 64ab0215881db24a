"""Pictures whose colours nobody takes for each other, and a mixture of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from farflung.mixtures.pictures.folder import PictureSplit
from farflung.mixtures.pictures.settings import PictureSplitSettings
from farflung.mixtures.pictures.split import split

EACH, SIDE = 60, 8


def write_pictures(folder: Path, classes: int = 3) -> Path:
    """Red, green and blue pictures of noise, each colour a class; the folder of all."""
    random = np.random.default_rng(2)  # one by which some of each are held out
    for label in range(classes):
        (folder / "pictures" / str(label)).mkdir(parents=True)
        for number in range(EACH):
            pixels = random.integers(0, 90, (SIDE, SIDE, 3), np.uint8)
            pixels[..., label] += 160
            Image.fromarray(pixels).save(folder / "pictures" / str(label) / f"{number}.png")
    return folder / "pictures"


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
