"""Matrices whose rows lie in several processes: each comes together whole in one of them, and goes back changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.cells import Cell, Piece, dealt
from farflung.hooks.layouts import Layout


class Wholes:
    """Some matrices of a layout, with their whole `shapes`. All processes that swap there make it and call it alike.

    Args:
        layout: which holders have which rows.
        names: of the matrices, the same in all processes; each gets about as many values to work on.
    """

    def __init__(self, layout: Layout, names: Iterable[str]) -> None:
        self._layout = layout
        self.shapes = {name: layout.outline[name] for name in names}
        self._worker = dealt([Cell((Piece(name, 0, s),)) for name, s in self.shapes.items()], layout.processes)
        self._own = [name for name, process in self._worker.items() if process == layout.process]

    def __call__(self, rows: Mapping[str, Tensor], work: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> None:
        """Replaces a process's own rows by what `work` makes of whole matrices: others of the same shapes.

        `rows` are of one dtype and device. Where all of a matrix's processes leave its rows out, they count as zeros.
        Raises PeerLostError.
        """
        like = next(iter(rows.values()), torch.zeros(0))
        wholes = [like.new_zeros(self.shapes[name]) for name in self._own]
        here = [self._rows_here(rows, process, like) for process in range(self._layout.processes)]
        self._layout.swap(here, self._cut(wholes), like)
        done = [whole.to(like).contiguous() for whole in work(wholes)]
        self._layout.swap(self._cut(done), here, like)

    def _rows_here(self, rows: Mapping[str, Tensor], process: int, like: Tensor) -> list[Tensor]:
        """This process's rows of the matrices that another one works on."""
        found = []
        for name in (name for name, worker in self._worker.items() if worker == process):
            begin, end = self._span(name, self._layout.process)
            if begin < end:
                found.append(rows[name] if name in rows else like.new_zeros(end - begin, *self.shapes[name][1:]))
        return found

    def _cut(self, wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """Each process's rows of the matrices that this one works on."""
        cut = []
        for process in range(self._layout.processes):
            spans = [self._span(name, process) for name in self._own]
            cut.append([whole[begin:end] for whole, (begin, end) in zip(wholes, spans, strict=True) if begin < end])
        return cut

    def _span(self, name: str, process: int) -> tuple[int, int]:
        """The rows that a process has of a matrix, as `torch.chunk` deals them out."""
        holders, count = self._layout.holders(name), self.shapes[name][0]
        if process not in holders:
            return 0, 0
        each = -(-count // len(holders))
        begin = each * holders.index(process)
        return min(begin, count), min(begin + each, count)
