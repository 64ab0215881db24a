"""How a process's parameters lie in its island, as rounds see it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from farflung.cells import Cell, Shape, dealt
from farflung.hooks.shared_memory import Parts
from farflung.pipeline.groups import ProcessGroups

T = TypeVar("T")


class IslandLayout:
    """See Layout. The shards of each stage keep its cells; or with a `gateway`, the island's first process keeps all.

    Args:
        groups: the processes of the island.
        outline: the whole shapes of all that the replica trains, by name and in order.
        owned: the names of what each process of the island has, in their order.
    """

    def __init__(
        self, groups: ProcessGroups, outline: Mapping[str, Shape], owned: Sequence[Collection[str]], gateway: bool
    ) -> None:
        own = groups.mesh.part(groups.coordinates)
        self.outline = outline
        self.here = owned[own]
        self._groups = groups
        self._owned = owned
        self._gateway = gateway
        self._swap = groups.swap_among_all if gateway else groups.swap
        shape, shard = groups.shape, groups.coordinates.shard
        self.processes, self.process = (shape.processes, own) if gateway else (shape.shards, shard)

    def holders(self, parameter: str) -> Sequence[int]:
        """See Layout."""
        if not self._gateway:
            return range(self.processes)
        return [number for number, names in enumerate(self._owned) if parameter in names]

    def keepers(self, cells: Sequence[Cell]) -> Mapping[str, int]:
        """See Layout."""
        if self._gateway:
            return dict.fromkeys((cell.name for cell in cells), 0)
        return dealt([cell for cell in cells if cell.pieces[0].parameter in self.here], self.processes)

    def within_stage(self) -> IslandLayout:
        """The same without a gateway: what the shards of a stage do among themselves."""
        return IslandLayout(self._groups, self.outline, self._owned, gateway=False)

    def swap(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """See Layout."""
        with self._groups.naming_the_lost():
            self._swap(outgoing, incoming, like)

    def total(self, values: Tensor) -> Tensor:
        """See Layout."""
        with self._groups.naming_the_lost():
            return self._groups.total(values)

    def told(self, value: T) -> list[T]:
        """See Layout."""
        with self._groups.naming_the_lost():
            return self._groups.told(value)
