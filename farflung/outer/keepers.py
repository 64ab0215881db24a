"""Whole cells at their keepers: gathered from the processes of a replica that have their rows, and scattered again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from farflung.cells import Cell, Piece
from farflung.hooks.layouts import Layout


class Keeper:
    """One process's part in keeping some cells, of which those that it swaps with have rows, too.

    Args:
        cells: the same for all of these processes.
        keepers: which of them keeps each, by its name.
        layout: how the rows lie.
    """

    def __init__(self, cells: Sequence[Cell], keepers: Mapping[str, int], layout: Layout) -> None:
        self._layout = layout
        everyone = range(layout.processes)
        pieces = [(keepers[cell.name], piece) for cell in cells for piece in cell.pieces]
        self._kept = [piece for keeper, piece in pieces if keeper == layout.process]
        # For each process: which of the own rows it keeps, by their parameter; its rows of what is kept here.
        self._away = [
            [(piece.parameter, rows) for k, piece in pieces if k == number for rows in self._own_rows(piece)]
            for number in everyone
        ]
        self._home = [
            [(place, rows) for place, piece in enumerate(self._kept) for rows in self._rows(piece, number)]
            for number in everyone
        ]

    def gather(self, local: Mapping[str, Tensor], out: Tensor) -> None:
        """Fills a flat tensor with the cells that are kept here; `local` are the rows that this process has."""
        self._layout.swap(self._of_local(local), self._of_flat(out), out)

    def scatter(self, flat: Tensor, local: Mapping[str, Tensor]) -> None:
        """Writes the rows that this process has of all cells; `flat` are those that are kept here."""
        self._layout.swap(self._of_flat(flat), self._of_local(local), flat)

    def _of_flat(self, flat: Tensor) -> list[list[Tensor]]:
        """What each process has rows of, in a flat tensor of the cells that are kept here."""
        parts = torch.split(flat, [piece.numel for piece in self._kept])
        wholes = [part.view(piece.shape) for piece, part in zip(self._kept, parts, strict=True)]
        return [[_some(wholes[place], rows) for place, rows in theirs] for theirs in self._home]

    def _of_local(self, local: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """What is kept at each process, of the rows that this one has."""
        return [[_some(local[name], rows) for name, rows in theirs] for theirs in self._away]

    def _rows(self, piece: Piece, process: int) -> list[slice]:
        """The rows of a piece that a process has, counted within it; none, or one slice."""
        holders = self._layout.holders(piece.parameter)
        if process not in holders:
            return []
        size, place = self._share(piece), holders.index(process)
        begin, end = (min(max(size * number - piece.begin, 0), _height(piece)) for number in (place, place + 1))
        return [slice(begin, end)] if begin < end else []

    def _own_rows(self, piece: Piece) -> list[slice]:
        """The rows of a piece that this process has, counted among all that it has of the parameter."""
        found = self._rows(piece, self._layout.process)
        if not found:
            return []
        place = self._layout.holders(piece.parameter).index(self._layout.process)
        first = piece.begin - self._share(piece) * place
        return [slice(first + rows.start, first + rows.stop) for rows in found]

    def _share(self, piece: Piece) -> int:
        """The rows of its parameter that each holder has, but for the last ones."""
        shape = self._layout.outline[piece.parameter]
        return -(-(shape[0] if shape else 1) // len(self._layout.holders(piece.parameter)))


def _height(piece: Piece) -> int:
    return piece.shape[0] if piece.shape else 1


def _some(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows; of a single number, one row."""
    return tensor[rows] if tensor.dim() else tensor.reshape(1)[rows]
