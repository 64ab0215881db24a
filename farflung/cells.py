"""Cells: named pieces of a model, in which weights are averaged, kept and fetched.

They follow from the names and shapes of what is trained alone, and are the same however a replica is divided.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Shape = tuple[int, ...]

FULL = 1 << 20
"""Values from which on a cell takes no further parameters."""

MOST = 1 << 26
"""The most values of one matrix in a cell; a larger one is cut between its rows."""


@dataclass(frozen=True)
class Piece:
    """Some rows of a parameter: all of them, unless it is very large.

    Args:
        parameter: its name in the model.
        begin: its first row there.
        shape: of these rows.
    """

    parameter: str
    begin: int
    shape: Shape

    @cached_property
    def numel(self) -> int:
        """Its values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cell:
    """Neighbours within one layer."""

    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """What comes first in it."""
        first = self.pieces[0]
        return first.parameter + (f"[{first.begin}:]" if first.begin else "")

    @cached_property
    def numel(self) -> int:
        """Its values."""
        return sum(piece.numel for piece in self.pieces)


def layers_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Cell]]:
    """The cells of parameters with these names and shapes, layer by layer, in order.

    A layer is what one number in a parameter's name counts (`model.layers.3.…`); what lies outside of layers
    (embeddings, norms, head) counts as one each.
    """
    layers: dict[str, list[Piece]] = {}
    for name, shape in shapes.items():
        layers.setdefault(_layer_of(name), []).extend(_pieces_of(name, tuple(shape)))
    return {layer: list(map(Cell, _runs(pieces))) for layer, pieces in layers.items()}


def _layer_of(name: str) -> str:
    numbered = re.match(r".*?\.?\d+(?=\.)", name)
    return numbered.group() if numbered else name.rpartition(".")[0] or name


def _pieces_of(name: str, shape: Shape) -> Iterator[Piece]:
    rows = shape[0] if shape else 1
    width = math.prod(shape[1:])
    step = max(1, MOST // max(width, 1))
    if rows <= step:
        yield Piece(name, 0, shape)
        return
    for begin in range(0, rows, step):
        yield Piece(name, begin, (min(step, rows - begin), *shape[1:]))


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    """Neighbours that are full together."""
    run: list[Piece] = []
    for piece in pieces:
        run.append(piece)
        if sum(one.numel for one in run) >= FULL:
            yield tuple(run)
            run = []
    if run:
        yield tuple(run)


def cells_among(layers: Sequence[Sequence[Shape]]) -> list[Cell]:
    """The cells of layers whose parameters have these shapes, in order."""
    named = {f"{layer}.{number}": shape for layer, shapes in enumerate(layers) for number, shape in enumerate(shapes)}
    return [cell for cells in layers_of(named).values() for cell in cells]


def dealt(cells: Sequence[Cell], keepers: int) -> dict[str, int]:
    """The number of the keeper that each cell goes to, by its name: all keepers get about as many values."""
    loads = [0] * keepers
    chosen = {}
    for cell in sorted(cells, key=lambda cell: -cell.numel):
        chosen[cell.name] = min(range(keepers), key=loads.__getitem__)
        loads[chosen[cell.name]] += cell.numel
    return chosen
