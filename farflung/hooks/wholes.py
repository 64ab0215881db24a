"""Matrices whose rows lie in several processes: each comes together whole in one of them, and goes back changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest

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

    def portions(self, most: int) -> list[list[str]]:
        """All names, in portions in which each process has at most `most` values to work on, or one matrix."""
        sizes: list[dict[str, int]] = [{} for _ in range(self._layout.processes)]
        for name, process in self._worker.items():
            sizes[process][name] = math.prod(self.shapes[name])
        each = zip_longest(*(portions(of_one, most) for of_one in sizes), fillvalue=[])
        return [[*chain(*together)] for together in each]

    def __call__(
        self,
        names: Sequence[str],
        rows: Mapping[str, Tensor],
        like: Tensor,
        work: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Replaces a process's own rows of some matrices by what `work` makes of them whole: others of their shapes.

        All processes give the same `names`, in the same order. `rows` have the dtype of `like`, and lie where it does.
        Where all of a matrix's processes leave its rows out, they count as zeros. Raises PeerLostError.
        """
        own = self._of(names, self._layout.process)
        wholes = [like.new_zeros(self.shapes[name]) for name in own]
        here = [self._rows_here(names, rows, process, like) for process in range(self._layout.processes)]
        self._layout.swap(here, self._cut(own, wholes), like)
        done = [whole.to(like).contiguous() for whole in work(wholes)]
        self._layout.swap(self._cut(own, done), here, like)

    def _of(self, names: Sequence[str], process: int) -> list[str]:
        """Those of some matrices that a process works on."""
        return [name for name in names if self._worker[name] == process]

    def _rows_here(self, names: Sequence[str], rows: Mapping[str, Tensor], process: int, like: Tensor) -> list[Tensor]:
        """This process's rows of the matrices that another one works on."""
        found = []
        for name in self._of(names, process):
            begin, end = self._span(name, self._layout.process)
            if begin < end:
                found.append(rows[name] if name in rows else like.new_zeros(end - begin, *self.shapes[name][1:]))
        return found

    def _cut(self, own: Sequence[str], wholes: Sequence[Tensor]) -> list[list[Tensor]]:
        """Each process's rows of the matrices that this one works on."""
        cut = []
        for process in range(self._layout.processes):
            spans = [self._span(name, process) for name in own]
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


def portions(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Names in their order, cut where the sizes of a portion, if these are several, would be more than `most`."""
    cut: list[list[str]] = []
    left = 0
    for name, size in sizes.items():
        if not cut or size > left:
            cut.append([])
            left = most
        cut[-1].append(name)
        left -= size
    return cut
