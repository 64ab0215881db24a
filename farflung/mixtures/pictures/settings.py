"""How pictures are split among experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farflung.errors import UserError
from farflung.tables import Checked, setting
from farflung.workloads.images.settings import GROUPS, LEAST_SIDE, ImagesSettings


@dataclass(frozen=True, kw_only=True)
class PictureSplitSettings(Checked):
    """Which pictures to split, among how many experts, and how the router learns."""

    workload: str = "images"
    """What is split: language, or images, which has flags of its own."""
    data: str = "glyphs"
    """What to split, as for train --data: glyphs, or a folder of pictures, whose sub-folders are classes."""
    out: Path
    """The folder to write; it must not exist, or be empty."""
    letters: str = ImagesSettings.letters
    """The letters that glyphs are drawn of; each is a class."""
    resize: int | None = setting(None, least=LEAST_SIDE)
    """Scale every picture to a square of so many pixels a side; unset: as they are, and 16 for glyphs."""
    experts: int = setting(4, least=2)
    """How many models the mixture is to have."""
    features: Literal["classifier", "pixels"] | None = None
    """What k-means compares: what a small classifier of the classes sees, or pixels; unset: pixels of one class."""
    fine: int = setting(1024, least=2)
    """Clusters of the first level of k-means, of which the second makes one for each expert."""
    router_width: int = setting(16, least=GROUPS)
    """Channels of the router's U-Net, a multiple of 8."""
    router_steps: int = setting(1000, least=1)
    """Training steps of the router."""
    batch_size: int = setting(64, least=1)
    """Pictures in each of them."""
    lr: float = setting(2e-3, above=0)
    """The router's learning rate, which falls to 0 at the end."""
    seed: int = setting(0, least=0)
    """Of k-means, and of the router's first weights, pictures and noise."""

    @property
    def pictures(self) -> ImagesSettings:
        """Which pictures these are, with all that are held out. Raises UserError."""
        given = {"data": self.data, "letters": self.letters, "resize": self.resize}
        return ImagesSettings(**given, eval_pictures=1 << 62)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        """Raises UserError."""
        super().__post_init__()
        _ = self.pictures
        if self.router_width % GROUPS:
            raise UserError(f"router_width is {self.router_width}; it must be a multiple of {GROUPS}")
