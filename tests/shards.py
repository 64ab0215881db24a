"""Islands of several processes inside one simulation: every process is a seat of the simulated network."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farflung.cells import Cell, dealt
from farflung.hooks.shared_memory import Parts
from farflung.hooks.swaps import copied
from farflung.networks import Group, PeerLostError, SimulatedNetwork
from farflung.networks.base import Combine, Packets, Pending
from farflung.pipeline import Mesh

LONGEST_SECONDS = 1e6


class Between:
    """The seat of a process among some of other replicas, in the order of the replicas."""

    elastic = timed = islands = near = board = None
    worth_a_packet = 0
    processes: tuple[int, ...] = ()

    def __init__(self, network: SimulatedNetwork, seats: Sequence[int]) -> None:
        self.rank = list(seats).index(network.rank)
        self.traffic = network.traffic
        self._seats = seats
        self._network = network
        self._replica_of = {seat: replica for replica, seat in enumerate(self._seats)}
        self.attachment, self.advance, self.now = network.attachment, network.advance, network.now

    def members(self) -> Group:
        return tuple(range(len(self._seats)))

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        return Renamed(self._network.exchange(packet, self._group(group), key), self._replicas)

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        return Renamed(self._network.all_reduce(tensor, self._group(group), key), lambda mean: mean)

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        own = {self._seats[replica]: packet for replica, packet in packets.items()}
        combined = lambda received: combine(self._replicas(received))  # noqa: E731
        pending = self._network.scatter_combine_gather(own, self._group(group), key, combined)
        return Renamed(pending, self._replicas)

    def _group(self, group: Group) -> Group:
        return tuple(self._seats[replica] for replica in group)

    def _replicas(self, packets: Packets) -> Packets:
        return {self._replica_of[seat]: packet for seat, packet in packets.items()}


class Islands(Between):
    """The seat of a process of an island; see farflung.networks.IslandNetwork."""

    def __init__(self, network: SimulatedNetwork, mesh: Mesh) -> None:
        coordinates = mesh.coordinates(network.rank)
        part = mesh.part(coordinates)
        super().__init__(network, [island[part % len(island)] for island in mesh.islands])
        self.island_processes = mesh.islands

    @property
    def islands(self) -> Islands:  # type: ignore[override]
        return self

    def between(self, processes: Sequence[int]) -> Between:
        return Between(self._network, processes)

    def everyone(self) -> SimulatedNetwork:
        return self._network


class Renamed:
    """A pending exchange, whose result is told in other words."""

    def __init__(self, pending: Pending[Any], rename: Callable[[Any], Any]) -> None:
        self._pending = pending
        self._rename = rename

    def done(self) -> bool:
        return self._pending.done()

    @property
    def finished_at(self) -> float:
        return self._pending.finished_at

    def wait(self, timeout: float) -> Any:
        try:
            return self._rename(self._pending.wait(timeout))
        except PeerLostError as lost:
            raise PeerLostError(lost.ranks, str(lost), self._rename(lost.delivered)) from lost


class SimulatedLayout:
    """See farflung.hooks.layouts; shards swap over the simulated network."""

    def __init__(
        self, outline: Mapping[str, tuple[int, ...]], here: Collection[str], network: SimulatedNetwork, mesh: Mesh
    ) -> None:
        coordinates = mesh.coordinates(network.rank)
        self.outline, self.here = outline, here
        self.processes, self.process = mesh.shape(coordinates.replica).shards, coordinates.shard
        self._network = network
        self._near, self._island = mesh.shard_group(coordinates), mesh.island_group(coordinates)
        self._numbers = itertools.count()

    def swap(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        told = self._told([[part.to(like) for part in parts] for parts in outgoing], self._near, "swap")
        for process, parts in zip(self._near, incoming, strict=True):
            copied(told[process][self.process], parts)

    def holders(self, parameter: str) -> Sequence[int]:
        return range(self.processes)

    def keepers(self, cells: Sequence[Cell]) -> Mapping[str, int]:
        return dealt([cell for cell in cells if cell.pieces[0].parameter in self.here], self.processes)

    def told(self, value: Any) -> list[Any]:
        return list(self._told(value, self._island, "facts").values())

    def total(self, values: Tensor) -> Tensor:
        return values.copy_(torch.stack(list(self._told(values, self._island, "total").values())).sum(0))

    def _told(self, what: Any, group: Group, kind: str) -> dict[int, Any]:
        packet = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8)
        packets = self._network.exchange(packet, group, f"{kind} {next(self._numbers)}").wait(LONGEST_SECONDS)
        return {process: pickle.loads(packet.numpy().tobytes()) for process, packet in packets.items()}
