"""A folder of pictures, whose sub-folders are classes, by their names or, in a part of other pictures, by number."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from farflung.errors import UserError
from farflung.files import files_below, write_text
from farflung.workloads.images.pictures import Form, Pictures
from farflung.workloads.images.settings import LEAST_SIDE

if TYPE_CHECKING:
    from PIL import Image

DEEP = {"I", "I;16", "I;16L", "I;16B"}
"""Pillow's modes of pictures of 16 bits a pixel."""
GREY = {"1", "L", "LA", *DEEP}
"""Those of pictures without colours."""


TABLE = "pictures.json"
"""Where it is there, it has the names of the `classes`, whose sub-folders are then called 0, 1 and so on.

So a part of some pictures has the classes of all of them. With `parts`, those sub-folders are in these folders.
"""


class _File(NamedTuple):
    path: Path
    label: int


@dataclass(frozen=True)
class Folder:
    """Pictures in files. Pictures that are in no sub-folder are of one class, named like the folder.

    Args:
        path: the folder.
        resize: pixels of the side of a square that pictures are scaled and cut to; None leaves them as they are.
    """

    path: Path
    resize: int | None

    @cached_property
    def form(self) -> Form:
        """See Form: it reads the heads of all files. Raises UserError."""
        colours, size, first = False, (0, 0), None
        for file in self._files:
            with _opened(file.path) as picture:
                colours |= picture.mode not in GREY
                if not self.resize and first and picture.size != size:
                    raise UserError(
                        f"data {self.path}: {first} is {size[0]}×{size[1]} pixels and {file.path} "
                        f"{picture.width}×{picture.height}; scale all of them: --resize "
                        f"{max(LEAST_SIDE, min(*size, *picture.size))}"
                    )
                first, size = first or file.path, picture.size
        width, height = (self.resize, self.resize) if self.resize else size
        return Form(self._classes, 3 if colours else 1, height, width)

    def read(self) -> Pictures:
        """All of them; what is transparent is white. Raises UserError."""
        form = self.form
        pixels = torch.empty(len(self._files), *form.shape, dtype=torch.uint8)
        for number, file in enumerate(self._files):
            with _opened(file.path) as picture:
                plain = _plain(picture).convert("L" if form.channels == 1 else "RGB")
                values = np.asarray(self._scaled(plain)).reshape(form.height, form.width, form.channels)
            pixels[number] = torch.from_numpy(values.copy()).permute(2, 0, 1)
        return Pictures(pixels, torch.tensor([file.label for file in self._files]))

    @cached_property
    def _classes(self) -> tuple[str, ...]:
        """The classes in the table, or the sub-folders' names, or the folder's own."""
        if not self.path.is_dir():
            raise UserError(f"data {str(self.path)!r}: there is no such folder; give glyphs, or a folder of pictures")
        if self._table:
            return tuple(self._table["classes"])
        below = sorted(path.name for path in self.path.iterdir() if path.is_dir() and any(_pictures(path)))
        if below and (loose := next((path for path in _pictures(self.path) if path.parent == self.path), None)):
            raise UserError(f"data {loose}: lies beside folders of classes; move it into one of them, or elsewhere")
        return tuple(below) or (self.path.name,)

    @cached_property
    def _table(self) -> dict[str, list[str]]:
        where = self.path / TABLE
        try:
            table = json.loads(where.read_text("utf-8"))
            return {name: [*map(str, table[name])] for name in ("classes", "parts")}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where} is damaged ({error!r}); make that part again, or remove the file") from error

    def _homes(self) -> list[tuple[int, Path]]:
        """Folders of pictures of one class, and its number."""
        if self._table:
            parts = [self.path / part for part in self._table["parts"]]
            return [(number, part / str(number)) for part in parts for number in range(len(self._classes))]
        if self._classes == (self.path.name,):
            return [(0, self.path)]
        return [(number, self.path / name) for number, name in enumerate(self._classes)]

    @cached_property
    def _files(self) -> list[_File]:
        found = [_File(path, label) for label, home in self._homes() for path in _pictures(home)]
        if not found:
            raise UserError(f"data {self.path}: holds no picture; give a folder of PNG, JPEG or other pictures")
        return found

    def _scaled(self, picture: Image.Image) -> Image.Image:
        from PIL import Image, ImageOps

        if not self.resize:
            return picture
        return ImageOps.fit(picture, (self.resize, self.resize), Image.Resampling.LANCZOS)


def write_part(path: Path, classes: Sequence[str], some: Pictures) -> None:
    """Writes pictures as a folder that has all classes of the whole that they are a part of."""
    from PIL import Image

    for number, (pixels, label) in enumerate(zip(some.pixels, some.labels.tolist(), strict=True)):
        home = path / str(label)
        home.mkdir(parents=True, exist_ok=True)
        values = pixels.permute(1, 2, 0).numpy()
        Image.fromarray(values.squeeze(-1) if len(pixels) == 1 else values).save(home / f"{number:06d}.png")
    write_table(path, classes, [""])


def write_table(path: Path, classes: Sequence[str], parts: Sequence[str]) -> None:
    """Says in a folder what the classes of pictures are, which lie in parts of it."""
    write_text(path / TABLE, json.dumps({"classes": [*classes], "parts": [*parts]}, ensure_ascii=False, indent=1))


def _pictures(folder: Path) -> Iterator[Path]:
    """The files in a folder, and below, whose names say that they are pictures, in order."""
    from PIL import Image

    known = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    return (path for path in sorted(files_below(folder)) if path.suffix.lower() in known)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """A picture, turned as its camera was held. Raises UserError for a file that holds none, or a part of one."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as picture:
            ImageOps.exif_transpose(picture, in_place=True)
            if picture.mode == "F":
                raise SyntaxError("its pixels are no whole numbers")
            yield picture
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"data {path}: cannot be read as a picture ({error}); mend it, or remove it") from error


def _plain(picture: Image.Image) -> Image.Image:
    """A picture of 8 bits a colour, on white where it is transparent."""
    from PIL import Image

    if picture.mode in DEEP:  # Pillow would make white of all that is not nearly black
        return Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    if not picture.has_transparency_data:
        return picture
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), layer)
