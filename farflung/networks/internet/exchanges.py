"""Exchanges of packets with peers, which run in the peers' thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from farflung.networks.base import (
    Combine,
    ElasticNetwork,
    Finished,
    Group,
    Network,
    Packets,
    PeerLostError,
    Pending,
)
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.transport import PacketTransport
from farflung.networks.reduction import Reduction
from farflung.networks.transfer import RealNetwork, Transfer
from farflung.renamed import Formerly

T = TypeVar("T")


class Exchanges(RealNetwork):
    """See Network.

    Args:
        rank: this replica's.
        deadline: others are waited for at most so many seconds.
        seats: the ranks of the peers where packets of replicas go and come from, if these are others.
    """

    relay, computed = Formerly("scatter_combine_gather"), Formerly("advance")
    islands = None
    processes: tuple[int, ...] = ()

    def __init__(
        self, rank: int, peers: Peers, transport: PacketTransport, deadline: float, seats: Mapping[int, int]
    ) -> None:
        super().__init__()
        self.rank = rank
        self.peers = peers
        self.near: Network | None = None
        self.traffic = transport.traffic
        self._transport = transport
        self._deadline = deadline
        self._seats = seats

    @property
    def elastic(self) -> ElasticNetwork | None:
        """See Network."""
        return None

    def members(self) -> Group:
        """See Network."""
        return tuple(sorted({self.rank, *self._seats}))

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.now())

        async def work(transfer: Transfer[Packets]) -> Packets:
            await self._swap(dict.fromkeys(transfer.others, packet), transfer, key, self._deadline)
            return transfer.all_with(packet)

        return self.begin(group, work)

    def all_to_all(self, packets: Packets, group: Group, key: str) -> Pending[Packets]:
        """See Network."""

        async def work(transfer: Transfer[Packets]) -> Packets:
            await self._swap(packets, transfer, key, self._deadline)
            return transfer.all_received()

        return self.begin(group, work)

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network. Combines in a thread of its own."""
        return self.begin(group, lambda transfer: self._combined(packets, combine, transfer, key))

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each member averages one part."""
        if group == (self.rank,):
            return Finished(tensor, self.now())

        async def work(transfer: Transfer[Tensor]) -> Tensor:
            parts = Reduction(tensor, self.rank, group)
            parts.put(await self._combined(parts.packets, parts.combine, transfer, key))
            return tensor

        return self.begin(group, work)

    def address(self, rank: int) -> str:
        """A replica's name in messages."""
        member = self.peers.members.by_rank.get(rank)
        return member.described if member else f"replica {rank} (unknown here)"

    def between(self, seats: Mapping[int, int]) -> Network:
        """See ElasticNetwork."""
        if all(rank == seat for rank, seat in seats.items()):
            return self
        return Exchanges(self.rank, self.peers, self._transport, self._deadline, seats)

    async def _combined(self, packets: Packets, combine: Combine, transfer: Transfer[Any], key: str) -> Packets:
        half = self._deadline / 2  # the other half of the time is for the way back
        await self._swap(packets, transfer, f"{key}, to be combined", half)
        received = {rank: transfer.delivered.pop(rank) for rank in sorted(transfer.delivered)}
        combined = await asyncio.to_thread(combine, received)
        await self._swap(dict.fromkeys(received, combined), transfer, f"{key}, combined", half)
        return transfer.all_with(combined)

    async def _swap(self, packets: Packets, transfer: Transfer[Any], key: str, deadline_s: float) -> None:
        await self._transport.swap(packets, transfer, key, deadline_s, self._seats)

    def begin(self, group: Group, work: Callable[[Transfer[T]], Awaitable[T]]) -> Transfer[T]:
        """Starts work in the peers' thread."""
        transfer = Transfer[T](self, group)

        async def run() -> None:
            try:
                transfer.finish(await work(transfer))
            except asyncio.CancelledError:
                transfer.fail(PeerLostError(transfer.others, "this peer has left the run"))
                raise
            except Exception as error:
                transfer.fail(error)

        self.peers.background.submit(run())
        return transfer
