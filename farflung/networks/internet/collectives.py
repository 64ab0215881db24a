"""Collectives among the peers of a group, packet by packet: a peer that fails in one is lost, the others continue."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor

from farflung.networks.base import Combine, Packets, mean_in_order
from farflung.networks.internet.members import Member
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.transport import PacketLostError, PacketTransport
from farflung.networks.transfer import Transfer

UNKNOWN_SECONDS = 5.0
"""Longest wait for a peer that others of the group have heard of first."""


class Collectives:
    """This peer's side; all methods run in the peers' thread, and raise PeerLostError.

    Args:
        peers: the peers.
        transport: carries the packets.
        deadline_s: the longest that others are waited for, in seconds.
    """

    def __init__(self, peers: Peers, transport: PacketTransport, deadline_s: float) -> None:
        self._peers = peers
        self._transport = transport
        self._deadline_s = deadline_s

    async def exchange(self, packet: Tensor, transfer: Transfer[Packets], key: str) -> Packets:
        """See Network."""
        await self._swap(dict.fromkeys(transfer.others, packet), transfer, key, self._deadline_s)
        return transfer.all_with(packet)

    async def scatter_combine_gather(
        self, packets: Packets, combine: Combine, transfer: Transfer[Any], key: str
    ) -> Packets:
        """See Network."""
        half = self._deadline_s / 2  # the other half of the time is for the way back
        await self._swap(packets, transfer, f"{key}, to be combined", half)
        received = {rank: transfer.delivered.pop(rank) for rank in sorted(transfer.delivered)}
        combined = await asyncio.to_thread(combine, received)
        await self._swap(dict.fromkeys(received, combined), transfer, f"{key}, combined", half)
        return transfer.all_with(combined)

    async def all_reduce(self, tensor: Tensor, transfer: Transfer[Tensor], key: str) -> Tensor:
        """See Network."""
        group, rank = transfer.group, self._peers.identity.rank
        parts = dict(zip(group, torch.tensor_split(tensor.view(-1), len(group)), strict=True))
        own = parts[rank]

        def combine(received: Packets) -> Tensor:
            if len(received) < len(group) - 1 or any(len(p) != own.nbytes for p in received.values()):
                return _bytes_of(own)
            values = {sender: packet.view(tensor.dtype) for sender, packet in received.items()} | {rank: own}
            return _bytes_of(mean_in_order([values[member] for member in group]))

        packets = {other: _bytes_of(parts[other]) for other in transfer.others}
        combined = await self.scatter_combine_gather(packets, combine, transfer, key)
        for member, part in parts.items():
            part.copy_(combined[member].view(tensor.dtype).to(part.device))
        return tensor

    async def _swap(self, packets: Packets, transfer: Transfer[Any], key: str, deadline_s: float) -> None:
        """Sends each its packet and takes each one's."""
        swaps = (self._swap_with(rank, packet, transfer, key, deadline_s) for rank, packet in packets.items())
        await asyncio.gather(*swaps)

    async def _swap_with(self, rank: int, packet: Tensor, transfer: Transfer[Any], key: str, deadline_s: float) -> None:
        awaited = self._transport.expect(rank, key)
        member = await self._found(rank, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                if member is None:
                    raise PacketLostError("it is not there")
                sending = asyncio.ensure_future(self._transport.send(member, key, packet.cpu(), deadline_s))
                try:
                    await asyncio.gather(sending, awaited)
                finally:
                    sending.cancel()
                    if awaited.done() and not awaited.cancelled() and not awaited.exception():
                        transfer.delivered[rank] = awaited.result()
        except (PacketLostError, TimeoutError) as error:
            transfer.lost[rank] = str(error) or f"it did not deliver within {deadline_s:g} s"
            if isinstance(error, PacketLostError) and error.gone:
                self._peers.members.failed(rank)
        finally:
            self._transport.forget(rank, key)

    async def _found(self, rank: int, deadline_s: float) -> Member | None:
        for _ in range(int(min(UNKNOWN_SECONDS, deadline_s) * 10)):
            if member := self._peers.members.by_rank.get(rank):
                return member
            await asyncio.sleep(0.1)
        return None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)
