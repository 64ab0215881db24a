"""What a network that draws is trained from."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.errors import UserError
from farflung.tables import BETWEEN_MACHINES, BETWEEN_PEERS, Checked, setting

GROUPS = 8
"""Of channels that are normalised together."""
LEAST_SIDE = 8
"""Pixels of a side that pictures can be scaled to, at least."""


@dataclass(frozen=True)
class ImagesSettings(Checked):
    """The network, and the pictures that it is trained on."""

    data: str = setting("glyphs", may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """glyphs (letters, drawn in this machine's fonts), or a folder of pictures, whose sub-folders are classes."""
    letters: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    """The letters that glyphs are drawn of; each is a class."""
    resize: int | None = setting(None, least=LEAST_SIDE)
    """Scale every picture to a square of so many pixels a side; unset: as they are, and 16 for glyphs."""
    width: int = setting(32, least=GROUPS)
    """Channels of the U-Net at the pictures' own size, a multiple of 8; up to four times as many at smaller sizes."""
    eval_pictures: int = setting(256, least=1)
    """Held-out pictures that the validation loss is measured on, at most."""
    drawn_pictures: int = setting(128, least=0)
    """Pictures that each evaluation draws for the Frechet distance; 0 or 1 leaves it out."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        super().__post_init__()
        if self.width % GROUPS:
            raise UserError(f"width is {self.width}; it must be a multiple of {GROUPS}")
        if self.data == "glyphs" and len(set(self.letters)) < max(1, len(self.letters)):
            raise UserError(f"letters is {self.letters!r}; give one letter or more, and each once")
