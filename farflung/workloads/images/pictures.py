"""Small pictures with classes, whole in memory."""

from __future__ import annotations

import hashlib
import io
from typing import NamedTuple

import torch
from torch import Tensor

from farflung.workloads.held_out import evenly, is_held_out

LEAST_SIDE = 48
"""Pixels of each picture in a grid, at least, so that a person can see it."""
GAP = 1
"""Pixels between the pictures of a grid, before they are enlarged."""


class Form(NamedTuple):
    """What is known of pictures before they are read."""

    classes: tuple[str, ...]
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one picture."""
        return self.channels, self.height, self.width


class Pictures(NamedTuple):
    """Pixels (n, channels, height, width) uint8, and the numbers of their classes (n,) int64."""

    pixels: Tensor
    labels: Tensor

    def at(self, ids: Tensor) -> Pictures:
        """Some of them, by number, or by whether each is one."""
        return Pictures(self.pixels[ids], self.labels[ids])

    def evenly(self, most: int) -> Pictures:
        """At most so many of them, evenly spread."""
        return self.at(torch.from_numpy(evenly(len(self.labels), most)))

    def values(self) -> Tensor:
        """Float32 from -1, black, to 1, white."""
        return self.pixels.float() / 127.5 - 1

    def split(self) -> tuple[Pictures, Pictures]:
        """Those to train on, and those held out: each by its pixels alone."""
        held_out = torch.tensor([is_held_out(pixels.numpy().tobytes()) for pixels in self.pixels])
        return self.at(~held_out), self.at(held_out)


def digest(some: Pictures) -> str:
    """A hash of their pixels, shapes and labels."""
    found = hashlib.sha256(str(tuple(some.pixels.shape)).encode())
    for tensor in some:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def grid(values: Tensor) -> bytes:
    """A PNG file of pictures (rows, columns, channels, height, width) from -1 to 1, enlarged if they are small."""
    from PIL import Image

    pixels = ((values.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    framed = torch.nn.functional.pad(pixels, (GAP, GAP, GAP, GAP), value=128)
    rows, columns, channels, height, width = framed.shape
    whole = framed.permute(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    picture = Image.fromarray(whole[..., 0].numpy() if channels == 1 else whole.numpy())
    times = -(-LEAST_SIDE // min(height, width))
    file = io.BytesIO()
    picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()
