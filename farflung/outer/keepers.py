"""Whole cells at their keepers: gathered from the shards of a replica, and scattered to them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from farflung.cells import Cell, Piece
from farflung.hooks.layouts import Layout


class Keeper:
    """One shard's part in keeping some cells, of whose rows all shards have some; one process keeps them all.

    Args:
        cells: the same for all shards.
        keepers: which shard keeps each, by its name.
        layout: how the rows lie.
    """

    def __init__(self, cells: Sequence[Cell], keepers: Mapping[str, int], layout: Layout) -> None:
        self._layout = layout
        self._shards = range(layout.shards)
        self._of = [[p for cell in cells if keepers[cell.name] == shard for p in cell.pieces] for shard in self._shards]
        self._kept = self._of[layout.shard]

    def gather(self, local: Mapping[str, Tensor], out: Tensor) -> None:
        """Fills a flat tensor with the cells that are kept here; `local` are the rows that this shard has, by name."""
        views = self._views(out)
        if self._layout.shards == 1:
            for piece, whole in views:
                whole.copy_(self._of_local(local, piece))
            return
        outgoing = [_flat([self._of_local(local, piece) for piece in pieces], out) for pieces in self._of]
        lengths = [sum(self._count(piece, shard) for piece in self._kept) for shard in self._shards]
        for shard, values in enumerate(self._layout.swap(outgoing, lengths)):
            parts = torch.split(values, [self._count(piece, shard) for piece in self._kept])
            for (piece, whole), part in zip(views, parts, strict=True):
                rows = whole[self._rows(piece, shard)]
                rows.copy_(part.view_as(rows))

    def scatter(self, flat: Tensor, local: Mapping[str, Tensor]) -> None:
        """Writes the rows that this shard has of all cells; `flat` are those that are kept here."""
        views, own = self._views(flat), self._layout.shard
        if self._layout.shards == 1:
            for piece, whole in views:
                self._of_local(local, piece).copy_(whole)
            return
        outgoing = [_flat([whole[self._rows(piece, shard)] for piece, whole in views], flat) for shard in self._shards]
        lengths = [sum(self._count(piece, own) for piece in pieces) for pieces in self._of]
        for pieces, values in zip(self._of, self._layout.swap(outgoing, lengths), strict=True):
            parts = torch.split(values, [self._count(piece, own) for piece in pieces])
            for piece, part in zip(pieces, parts, strict=True):
                if part.numel():
                    rows = self._of_local(local, piece)
                    rows.copy_(part.view_as(rows))

    def _views(self, flat: Tensor) -> list[tuple[Piece, Tensor]]:
        parts = torch.split(flat, [piece.numel for piece in self._kept])
        return [(piece, part.view(piece.shape)) for piece, part in zip(self._kept, parts, strict=True)]

    def _rows(self, piece: Piece, shard: int) -> slice:
        """The rows of a piece that a shard has, counted within it."""
        size = self._share(piece)
        begin, end = (min(max(size * number - piece.begin, 0), piece.shape[0]) for number in (shard, shard + 1))
        return slice(begin, end)

    def _count(self, piece: Piece, shard: int) -> int:
        rows = self._rows(piece, shard)
        return int(rows.stop - rows.start) * int(math.prod(piece.shape[1:]))

    def _of_local(self, local: Mapping[str, Tensor], piece: Piece) -> Tensor:
        """What this shard has of a piece, in its own rows."""
        if not piece.shape:
            return local[piece.parameter]
        rows = self._rows(piece, self._layout.shard)
        if rows.start == rows.stop:
            return torch.empty(0, *piece.shape[1:])
        first = piece.begin - self._share(piece) * self._layout.shard
        return local[piece.parameter][first + rows.start : first + rows.stop]

    def _share(self, piece: Piece) -> int:
        """The rows of its parameter that each shard has, but for the last ones."""
        rows: int = self._layout.outline[piece.parameter][0]
        return -(-rows // self._layout.shards)


def _flat(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like.new_empty(0), *(part.reshape(-1).to(like) for part in parts)])
