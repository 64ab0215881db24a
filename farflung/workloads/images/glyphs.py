"""Letters drawn in this machine's fonts, each in many sizes, places and slants."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farflung.errors import UserError
from farflung.workloads.held_out import evenly
from farflung.workloads.images.pictures import Form, Pictures

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

SIDE = 16
"""Pixels of a picture's side, unless settings say another number."""
EACH = 200
"""Pictures of each letter."""
MOST_FONTS = 48
"""Fonts that letters are drawn in, at most; of more, some that are evenly spread over the list."""
FINER = 4
"""How much larger letters are drawn before they are scaled down."""
SIZES = (0.75, 1.0)
"""The least and greatest size of a font, as a part of the picture's side."""
SHIFT, SLANT = 0.08, 0.25
"""How far letters move, as a part of the picture's side, and lean, as a part of their height, at most."""
KINDS = (".ttf", ".otf", ".ttc")


def font_folders() -> list[Path]:
    """Where this machine keeps fonts; not all of them need be there."""
    home = Path("~").expanduser()
    if sys.platform == "darwin":
        return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    if sys.platform == "win32":
        return [Path(os.environ.get("WINDIR", "C:/Windows"), "Fonts")]
    shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
    return [home / ".fonts", home / ".local/share/fonts", *(Path(one, "fonts") for one in shared.split(":"))]


@dataclass(frozen=True)
class Glyphs:
    """Letters as pictures with one channel, dark on white; each letter is a class.

    Args:
        letters: one character each.
        side: pixels of a picture's side.
        folders: where fonts are looked for. Where none of them has all letters, they are drawn in Pillow's own.
    """

    letters: str
    side: int
    folders: tuple[Path, ...]

    @property
    def form(self) -> Form:
        """See Form. Raises UserError."""
        return Form(tuple(self.letters), 1, self.side, self.side)

    def read(self) -> Pictures:
        """EACH pictures of each letter; the same ones where the fonts are the same. Raises UserError."""
        fonts = self.fonts()
        drawn = [self._drawn(fonts, number) for number in range(len(self.letters) * EACH)]
        labels = torch.arange(len(self.letters)).repeat_interleave(EACH)
        return Pictures(torch.from_numpy(np.stack(drawn)).unsqueeze(1), labels)

    def fonts(self) -> list[Any]:
        """Fonts that have a picture of its own for each letter, or Pillow's own. Raises UserError."""
        from PIL import ImageFont

        size = self.side * FINER
        found = [font for path in _files(self.folders) if (font := _font(path, size)) and self._has_all(font)]
        if not found:
            own: Any = ImageFont.load_default(size)
            if not self._has_all(own):
                raise UserError(f"letters is {self.letters!r}, and no font of this machine has them all; install one")
            return [own]
        return [found[number] for number in evenly(len(found), MOST_FONTS)]

    def _has_all(self, font: Any) -> bool:
        """Whether it has a shape of its own for each letter: what a font lacks, it draws as one empty box."""
        shapes = [bytes(font.getmask(letter)) for letter in self.letters]
        return all(map(any, shapes)) and len(set(shapes)) == len(shapes)

    def _drawn(self, fonts: list[Any], number: int) -> NDArray[np.uint8]:
        """(side, side), one letter in one font, size, place and slant, which follow from the number."""
        from PIL import Image, ImageDraw

        random = np.random.default_rng((len(fonts), number))
        font = fonts[random.integers(len(fonts))]
        large = self.side * FINER
        font = font.font_variant(size=int(large * random.uniform(*SIZES)))
        across, down = large * (0.5 + random.uniform(-SHIFT, SHIFT, size=2))
        picture = Image.new("L", (large, large), 255)
        letter = self.letters[number // EACH]
        left, top, right, bottom = font.getbbox(letter)
        place = across - (left + right) / 2, down - (top + bottom) / 2
        ImageDraw.Draw(picture).text(place, letter, fill=0, font=font)
        return np.asarray(_leaning(picture, random.uniform(-SLANT, SLANT)).resize((self.side, self.side)))


def _leaning(picture: Image.Image, slant: float) -> Image.Image:
    from PIL import Image

    moved = (1, slant, -slant * picture.height / 2, 0, 1, 0)
    return picture.transform(
        picture.size, Image.Transform.AFFINE, moved, resample=Image.Resampling.BILINEAR, fillcolor=255
    )


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    """Files of fonts in these folders and below, in the order of their names, each name once."""
    found = {
        path.name: path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix.lower() in KINDS
    }
    return (found[name] for name in sorted(found))


def _font(path: Path, size: int) -> Any:
    """A font of this size; None for a file that holds none, or none of any size."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    except OSError:
        return None
