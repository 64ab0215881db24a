"""Columns: cells that the same processes keep, one of each replica, and in which these hold a round.

Where replicas are single processes, or islands of equal layouts, all that a process keeps is one column. Islands of
unlike layouts meet in several: the keepers of a cell in each of them exchange it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.start import DisagreementError, all_there
from farflung.networks import ElasticNetwork, Group, IslandNetwork, Network, Party
from farflung.networks.base import by_island, fact_in, fact_packet
from farflung.outer.bundles import Cells


@dataclass(frozen=True)
class Message:
    """A flat tensor that consists of some cells; `views` makes their tensors of it."""

    flat: Tensor
    names: Sequence[str]
    views: Callable[[Tensor], Cells]

    @cached_property
    def cells(self) -> Cells:
        """The tensors of each cell; only made where they are wanted, since that takes time."""
        return self.views(self.flat)

    def like(self, flat: Tensor) -> Message:
        """Other values of the same cells."""
        return Message(flat, self.names, self.views)

    def part(self, cells: Sequence[str]) -> Message:
        """A copy of some cells; the message itself where that is all of them."""
        if len(cells) == len(self.names):
            return self
        chosen = {cell: self.cells[cell] for cell in cells}
        flat = torch.cat([tensor.reshape(-1) for tensors in chosen.values() for tensor in tensors])
        return Message(flat, cells, partial(views_like, chosen))

    def put(self, part: Message) -> None:
        """Writes the values of a part into this, unless they lie there already."""
        if part.flat.data_ptr() == self.flat.data_ptr():
            return
        for cell in self.cells.keys() & part.cells.keys():
            for to, tensor in zip(self.cells[cell], part.cells[cell], strict=True):
                to.copy_(tensor)


def views_like(cells: Cells, flat: Tensor) -> Cells:
    """A flat tensor as tensors of these cells."""
    parts = iter(torch.split(flat, [tensor.numel() for tensors in cells.values() for tensor in tensors]))
    return {cell: [next(parts).view_as(tensor) for tensor in tensors] for cell, tensors in cells.items()}


@dataclass(frozen=True)
class Column:
    """Some cells, and the network of their keepers, in which ranks are replicas."""

    network: Network
    cells: tuple[str, ...]
    name: str = ""
    """What tells it from the others of a group, which some of the same processes share."""

    def key(self, of: str) -> str:
        """The key of an exchange in it, from that of all columns."""
        return f"{of}, {self.name}" if self.name else of


class Columns:
    """Tells with whom a process exchanges the cells that it keeps.

    Args:
        network: of the replicas.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._keepers: list[dict[str, int]] | None = None

    def meet(self, cells: Sequence[str], rest: Sequence[str], key: str, seconds: float) -> None:
        """Tells the processes of all islands what this one keeps, and learns what they do.

        Unlike islands can only have cells in common: not the `rest` of a model, such as buffers. Raises PeerLostError,
        DisagreementError where islands train unlike parameters, and UserError where their models have a rest, or two
        processes of one keep the same.
        """
        if (islands := self._network.islands) is None:
            return
        everyone = islands.everyone()
        own = fact_packet([cells, rest])
        packets = all_there(everyone, everyone.exchange(own, everyone.members(), key), seconds)
        layouts = by_island(islands, (fact_in(packet) for packet in packets.values()))
        if all(layout == layouts[0] for layout in layouts):
            return
        if named := sorted(name for layout in layouts for _, rest in layout for name in rest):
            raise UserError(
                f"the model keeps {named[0]} besides its trained weights, which islands of unlike layouts cannot "
                "average; give all islands the same stages and shards"
            )
        self._keepers = list(map(_keepers, range(len(layouts)), layouts, islands.island_processes))
        unlike = [place for place, kept in enumerate(self._keepers) if kept.keys() != self._keepers[0].keys()]
        if unlike:
            raise DisagreementError(
                f"replica {unlike[0]} trains other parameters than replica 0; give all replicas the same model"
            )

    @property
    def unlike(self) -> bool:
        """Whether islands have been found to keep other cells than each other."""
        return self._keepers is not None

    def of(self, group: Group, cells: Sequence[str]) -> list[Column]:
        """The columns of some cells in a group, this replica's among them; none where it sits out."""
        if not group:
            return []
        if self._keepers is None:
            return [Column(self._network, tuple(cells))]
        islands = self._network.islands
        assert islands
        found: dict[tuple[int, ...], list[str]] = {}
        for cell in cells:
            found.setdefault(tuple(self._keepers[replica][cell] for replica in group), []).append(cell)
        return [Column(_between(islands, group, keepers), tuple(kept), kept[0]) for keepers, kept in found.items()]


def of_party(network: ElasticNetwork, party: Party, cells: Sequence[str]) -> list[Column]:
    """The columns of some cells among those who have come to a round."""
    found: dict[tuple[int, ...], list[str]] = {}
    for cell in cells:
        seats = (party.seats[rank][cell] if rank in party.seats else rank for rank in party.group)
        found.setdefault(tuple(seats), []).append(cell)
    return [
        Column(network.between(dict(zip(party.group, seats, strict=True))), tuple(kept), _name(kept))
        for seats, kept in found.items()
    ]


def _name(cells: Sequence[str]) -> str:
    """Tells a column from all others: who has heard otherwise of an island's layout must not take its packets."""
    return f"cells {hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]}"


def _keepers(replica: int, layout: Sequence[tuple[list[str], list[str]]], island: Group) -> dict[str, int]:
    """The process that keeps each cell in an island. Raises UserError where two of them do, as under HSDP."""
    found: dict[str, int] = {}
    for (cells, _), process in zip(layout, island, strict=True):
        for cell in cells:
            if cell in found:
                raise UserError(
                    f"processes {found[cell]} and {process} of replica {replica} both keep {cell}, and islands of "
                    "unlike layouts need one keeper; shard that island over a mesh of one dimension, or give all "
                    "islands the same mesh"
                )
            found[cell] = process
    return found


def _between(islands: IslandNetwork, group: Group, keepers: Sequence[int]) -> Network:
    """The network of some processes of a group; of the other replicas, which stay out, it has the first process."""
    processes: Mapping[int, int] = dict(zip(group, keepers, strict=True))
    return islands.between([processes.get(place, island[0]) for place, island in enumerate(islands.island_processes)])
