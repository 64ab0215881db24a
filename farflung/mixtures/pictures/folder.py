"""A mixture's folder, of pictures: see farflung/mixtures/folder.py. MIX/router/ is one network."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.mixtures.folder import COPY_AGAIN, Split
from farflung.workloads.images.settings import ImagesSettings
from farflung.workloads.images.workload import Images

EXAMPLES = "examples.png"
"""A row of pictures of each part."""


@dataclass(frozen=True, kw_only=True)
class PictureSplit(Split):
    """Pictures that were split among experts."""

    workload: ClassVar[str] = "images"
    classes: list[str]
    purity: float | None
    """The share of pictures that are of the class that most of their part's are of; None for one class."""
    hits: dict[str, float] = field(default_factory=dict)
    """By the share of noise in the pictures held out, the share of them whose part the router knows."""

    def agrees(self) -> bool:
        """See Split; classes that no picture is of may have no count."""
        shares = all(re.fullmatch(r"[01](\.\d+)?", share) for share in self.hits)
        return super().agrees() and shares and all(len(row) <= len(self.classes) for row in self.dealt)

    @property
    def router(self) -> Path:
        """The router's folder."""
        return self.folder / "router"

    @property
    def examples(self) -> Path:
        """A picture of pictures of each part."""
        return self.folder / EXAMPLES

    def numbers(self) -> Tensor:
        """(n,) int64: which part each picture is of, of all that are trained on, in the order of the whole folder."""
        return torch.arange(self.experts).repeat_interleave(torch.tensor([sum(row) for row in self.dealt]))

    def whole(self, drawn: int = 0) -> Images:
        """The pictures of all parts, with so many drawn ones for the Frechet distance."""
        return _images(self.folder, drawn)

    def refuse_others(self, whole: Images) -> None:
        """Raises UserError where the pictures of all parts are not as many as were split."""
        told = sum(map(sum, self.dealt)), sum(self.held_out)
        there = whole.available, len(whole.held_out.labels)
        if told != there:
            raise UserError(
                f"{self.folder} was split with {told[0]} pictures to train on and {told[1]} held out, and has "
                f"{there[0]} and {there[1]}; {COPY_AGAIN}"
            )

    def part(self, expert: int) -> Images:
        """Those of one part, without the distance."""
        return _images(self.store(expert), 0)


def _images(folder: Path, drawn: int) -> Images:
    """A folder's pictures, of which all that are held out count."""
    return Images(ImagesSettings(data=str(folder), eval_pictures=1 << 62, drawn_pictures=drawn))
