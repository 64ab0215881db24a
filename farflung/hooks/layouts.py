"""How what a process trains lies in its replica: all of it, some of its layers, or rows of these."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farflung.cells import Cell, Shape, dealt
from farflung.errors import UserError
from farflung.hooks.shared_memory import Parts
from farflung.hooks.swaps import Swaps, copied

T = TypeVar("T")


@runtime_checkable
class Layout(Protocol):
    """How a replica is divided. Where it is, all of its processes call the methods alike.

    `outline` has the whole shapes of all that the replica trains, by name and in order; `here` are the names of what
    this process has. `processes` of the replica swap with each other, of which it is number `process`; each of a
    parameter's holders has some of its rows, as `torch.chunk` deals them out.
    """

    @property
    def outline(self) -> Mapping[str, Shape]: ...  # noqa: D102

    @property
    def here(self) -> Collection[str]: ...  # noqa: D102

    @property
    def processes(self) -> int: ...  # noqa: D102

    @property
    def process(self) -> int: ...  # noqa: D102

    def holders(self, parameter: str) -> Sequence[int]:
        """Which of those that swap have rows of a parameter, in the rows' order."""
        ...

    def keepers(self, cells: Sequence[Cell]) -> Mapping[str, int]:
        """Which of those that swap keeps each of their cells, by its name."""
        ...

    def swap(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """Sends each of them some tensors, and fills some with those of each, in the same order, of the same sizes.

        Values travel as `like` is: in its dtype, and where processes share no memory from its device.
        Raises PeerLostError.
        """
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the replica's processes of flat float64 values. Raises PeerLostError."""
        ...

    def told(self, value: T) -> list[T]:
        """What each of the replica's processes says: anything that can be pickled. Raises PeerLostError."""
        ...


class Undivided:
    """The layout of a replica that this process has all of.

    Args:
        parameters: what is trained, by name.
    """

    processes, process = 1, 0

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.outline: Mapping[str, Shape] = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.here: Collection[str] = self.outline.keys()

    def holders(self, parameter: str) -> Sequence[int]:
        """See Layout."""
        return range(self.processes)

    def keepers(self, cells: Sequence[Cell]) -> Mapping[str, int]:
        """See Layout."""
        return dealt(cells, self.processes)

    def swap(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """See Layout."""
        copied(outgoing[0], incoming[0])

    def total(self, values: Tensor) -> Tensor:
        """See Layout."""
        return values

    def told(self, value: T) -> list[T]:
        """See Layout."""
        return [value]


class FullySharded(Undivided):
    """The layout of a model that its user has sharded with FSDP2.

    Args:
        parameters: what is trained, by name: DTensors, all of one mesh.

    Raises UserError where some are divided in another way.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        ways = {(p.device_mesh, p.placements) if is_sharded(p) else None for p in parameters.values()}
        way = ways.pop()
        dims = [place for place, kind in enumerate(way[1]) if kind.is_shard()] if way else []
        if ways or way is None or len(dims) != 1 or way[1][dims[0]].dim:
            raise UserError(
                "the model's parameters are divided in several ways, or not by their rows; "
                "shard them all with fully_shard over one mesh"
            )
        self._device = way[0].device_type
        self._everyone = way[0].get_all_groups()  # more than those that swap, where each shard is in several processes
        group = way[0].get_group(dims[0])
        self.processes, self.process = dist.get_world_size(group), dist.get_rank(group)
        self._swaps = Swaps(group)

    def swap(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """See Layout."""
        self._swaps(outgoing, incoming, like)

    def total(self, values: Tensor) -> Tensor:
        """See Layout."""
        there = values.to(self._device)  # a group may have no other
        for group in self._everyone:
            dist.all_reduce(there, group=group)
        return values.copy_(there)

    def told(self, value: T) -> list[T]:
        """See Layout."""
        told = [value]
        for group in reversed(self._everyone):  # the last dimension of the mesh runs fastest
            parts = [told] * dist.get_world_size(group)
            dist.all_gather_object(parts, told, group=group)
            told = [one for part in parts for one in part]
        return told


def first_told(layout: Layout, word: str) -> str:
    """What the first of a replica's processes says that does not say "", else that; all of them call this alike.

    Where nobody says anything, as is usual, it takes no more than a sum. Raises PeerLostError.
    """
    if not layout.total(torch.tensor([bool(word)], dtype=torch.float64)):
        return ""
    return next(filter(None, layout.told(word)))


def layout_of(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Layout:
    """How some of a model's parameters lie: as the model itself says, or as they show. Raises UserError."""
    if isinstance(told := getattr(model, "layout", None), Layout):
        return told
    return FullySharded(parameters) if any(map(is_sharded, parameters.values())) else Undivided(parameters)


def is_sharded(parameter: Any) -> bool:
    """Whether it is a DTensor; that class is slow to import."""
    return hasattr(parameter, "placements")
