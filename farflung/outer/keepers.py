"""Whole cells at their keepers: gathered from the processes of a replica that have their rows, and scattered again."""

from __future__ import annotations

import math
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
        # Of each process the pieces that it keeps, with the rows that this one has of them; and the other way round.
        self._away = [[(p, self._rows(p, layout.process)) for k, p in pieces if k == number] for number in everyone]
        self._home = [[self._rows(piece, number) for piece in self._kept] for number in everyone]

    def gather(self, local: Mapping[str, Tensor], out: Tensor) -> None:
        """Fills a flat tensor with the cells that are kept here; `local` are the rows that this process has."""
        views = self._views(out)
        if self._layout.processes == 1:
            for piece, whole in views:
                whole.copy_(self._of_local(local, piece))
            return
        outgoing = [_flat([self._of_local(local, piece) for piece, _ in theirs], out) for theirs in self._away]
        for rows, values in zip(self._home, self._layout.swap(outgoing, self._lengths(self._home)), strict=True):
            parts = torch.split(values, [_values(piece, some) for piece, some in zip(self._kept, rows, strict=True)])
            for (piece, whole), some, part in zip(views, rows, parts, strict=True):
                to = _some(whole, piece, some)
                to.copy_(part.view_as(to))

    def scatter(self, flat: Tensor, local: Mapping[str, Tensor]) -> None:
        """Writes the rows that this process has of all cells; `flat` are those that are kept here."""
        views = self._views(flat)
        if self._layout.processes == 1:
            for piece, whole in views:
                self._of_local(local, piece).copy_(whole)
            return
        outgoing = [
            _flat([_some(whole, piece, some) for (piece, whole), some in zip(views, rows, strict=True)], flat)
            for rows in self._home
        ]
        lengths = [sum(_values(piece, some) for piece, some in theirs) for theirs in self._away]
        for theirs, values in zip(self._away, self._layout.swap(outgoing, lengths), strict=True):
            parts = torch.split(values, [_values(piece, some) for piece, some in theirs])
            for (piece, _), part in zip(theirs, parts, strict=True):
                if part.numel():
                    to = self._of_local(local, piece)
                    to.copy_(part.view_as(to))

    def _lengths(self, home: Sequence[Sequence[slice]]) -> list[int]:
        return [sum(_values(piece, some) for piece, some in zip(self._kept, rows, strict=True)) for rows in home]

    def _views(self, flat: Tensor) -> list[tuple[Piece, Tensor]]:
        parts = torch.split(flat, [piece.numel for piece in self._kept])
        return [(piece, part.view(piece.shape)) for piece, part in zip(self._kept, parts, strict=True)]

    def _rows(self, piece: Piece, process: int) -> slice:
        """The rows of a piece that a process has, counted within it."""
        holders = self._layout.holders(piece.parameter)
        if process not in holders:
            return slice(0, 0)
        size, place = self._share(piece), holders.index(process)
        begin, end = (min(max(size * number - piece.begin, 0), _height(piece)) for number in (place, place + 1))
        return slice(begin, end)

    def _of_local(self, local: Mapping[str, Tensor], piece: Piece) -> Tensor:
        """What this process has of a piece, in its own rows."""
        rows = self._rows(piece, self._layout.process)
        if rows.start == rows.stop:
            return torch.empty(0, *piece.shape[1:])
        place = self._layout.holders(piece.parameter).index(self._layout.process)
        first = piece.begin - self._share(piece) * place
        return _some(local[piece.parameter], piece, slice(first + rows.start, first + rows.stop))

    def _share(self, piece: Piece) -> int:
        """The rows of its parameter that each holder has, but for the last ones."""
        shape = self._layout.outline[piece.parameter]
        return -(-(shape[0] if shape else 1) // len(self._layout.holders(piece.parameter)))


def _height(piece: Piece) -> int:
    return piece.shape[0] if piece.shape else 1


def _values(piece: Piece, rows: slice) -> int:
    return int(rows.stop - rows.start) * math.prod(piece.shape[1:])


def _some(tensor: Tensor, piece: Piece, rows: slice) -> Tensor:
    """Some rows of a piece; of a single number, one row."""
    return tensor[rows] if piece.shape else tensor.reshape(1)[rows]


def _flat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(part.reshape(-1).to(like) for part in parts)])
