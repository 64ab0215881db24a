"""How a process's parameters lie in its island, as rounds see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from farflung.cells import Shape
from farflung.pipeline.groups import ProcessGroups


class IslandLayout:
    """See Layout.

    Args:
        groups: the processes of the island.
        outline: the whole shapes of all that the replica trains, by name and in order.
        here: the names of what this process has.
    """

    def __init__(self, groups: ProcessGroups, outline: Mapping[str, Shape], here: Collection[str]) -> None:
        self.outline = outline
        self.here = here
        self.shards, self.shard = groups.shape.shards, groups.coordinates.shard
        self._groups = groups

    def swap(self, outgoing: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """See Layout."""
        with self._groups.naming_the_lost():
            return self._groups.swap(outgoing, lengths)

    def total(self, values: Tensor) -> Tensor:
        """See Layout."""
        with self._groups.naming_the_lost():
            return self._groups.total(values)
