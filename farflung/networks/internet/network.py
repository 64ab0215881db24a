"""Replicas as peers on the open internet, that come and go: hivemind's DHT and libp2p streams."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.networks.base import (
    Combine,
    ElasticNetwork,
    Finished,
    Group,
    Network,
    Packets,
    Party,
    PeerLostError,
    Pending,
    SharedState,
    mean_in_order,
)
from farflung.networks.internet.examination import answer_probes
from farflung.networks.internet.fetching import Fetching
from farflung.networks.internet.handshake import OTHER_SHAPES, newcomer_info
from farflung.networks.internet.identity import Identity
from farflung.networks.internet.matchmaker import Matchmaker
from farflung.networks.internet.pace import Pace, counted_step
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.snapshots import Snapshots
from farflung.networks.internet.ticket import Ticket, read_ticket
from farflung.networks.internet.transport import PacketTransport
from farflung.networks.listening import ListenAddress
from farflung.networks.transfer import IN_BACKGROUND, RealNetwork, Transfer
from farflung.renamed import Formerly

T = TypeVar("T")

LARGEST = 1 << 33
"""Bytes of the largest message, before the model is known."""
BYTES_A_VALUE = 16
"""The largest message of a model, for each of its values."""
ROOM = 1 << 20
"""Bytes that a packet may be larger than expected."""


class InternetNetwork(RealNetwork):
    """A peer's seat in a run on the internet. Its rank is a number made of its key.

    No message of more than `largest` bytes is taken. Others are waited for at most `deadline` seconds. What has come of
    the others' state is kept in the folder `fetched`, if given, until it was taken.

    Raises UserError when there is nobody to join, or they do not want this peer.
    """

    relay, computed = Formerly("scatter_combine_gather"), Formerly("advance")
    islands = None
    processes: tuple[int, ...] = ()

    def __init__(
        self, peers: Peers, largest: int = LARGEST, deadline: float = 120.0, fetched: Path | None = None
    ) -> None:
        super().__init__()
        self.peers = peers
        self.near: Network | None = None
        self.rank = peers.identity.rank
        stall_s = max(5.0, min(15.0, deadline / 4))
        self._transport = PacketTransport(peers, largest + ROOM, stall_s, self.traffic)
        self._deadline = deadline
        self._matchmaker = Matchmaker(peers, deadline / 2)
        answer_probes(peers)
        self._snapshots = Snapshots(peers, stall_s)
        self._states = Fetching(peers, 4 * largest + ROOM, stall_s, fetched)
        self._source: Callable[[], SharedState] | None = None
        self._prefetched: Pending[SharedState] | None = None
        self._pace = Pace()
        peers.start(deadline)

    @classmethod
    def from_env(cls, deadline: float = 120.0) -> InternetNetwork:
        """Joins the run that FARFLUNG_TICKET leads to; this peer's key is in FARFLUNG_KEY, by default ./peer.key.

        FARFLUNG_LISTEN and FARFLUNG_PORT say where it listens. Raises UserError.
        """
        ticket = read_ticket(Path(os.environ["FARFLUNG_TICKET"]))
        local = ListenAddress(os.environ.get("FARFLUNG_LISTEN", "0.0.0.0"), int(os.environ.get("FARFLUNG_PORT", "0")))
        identity = Identity(Path(os.environ.get("FARFLUNG_KEY", "peer.key")))
        return cls(Peers(ticket, identity, local, newcomer_info(ticket)), deadline=deadline)

    @property
    def elastic(self) -> ElasticNetwork:
        """See Network."""
        return self

    @property
    def refused(self) -> Mapping[str, int]:
        """See ElasticNetwork."""
        return self.peers.guard.refused

    def members(self) -> Group:
        """The training peers that were heard lately, and this one."""
        return tuple(sorted({self.rank, *(member.rank for member in self.peers.members.training())}))

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.now())

        async def work(transfer: Transfer[Packets]) -> Packets:
            await self._transport.swap(dict.fromkeys(transfer.others, packet), transfer, key, self._deadline)
            return transfer.all_with(packet)

        return self._begin(group, work)

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network. Combines in a thread of its own."""
        return self._begin(group, lambda transfer: self._combined(packets, combine, transfer, key))

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each member averages one part."""
        if group == (self.rank,):
            return Finished(tensor, self.now())

        async def work(transfer: Transfer[Tensor]) -> Tensor:
            parts = dict(zip(group, torch.tensor_split(tensor.view(-1), len(group)), strict=True))
            own = parts[self.rank]

            def combine(received: Packets) -> Tensor:
                if len(received) < len(group) - 1 or any(len(p) != own.nbytes for p in received.values()):
                    return _bytes_of(own)
                values = {sender: packet.view(tensor.dtype) for sender, packet in received.items()} | {self.rank: own}
                return _bytes_of(mean_in_order([values[member] for member in group]))

            packets = {other: _bytes_of(parts[other]) for other in transfer.others}
            combined = await self._combined(packets, combine, transfer, key)
            for member, part in parts.items():
                part.copy_(combined[member].view(tensor.dtype).to(part.device))
            return tensor

        return self._begin(group, work)

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, anchor_digest: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """See ElasticNetwork. Who cannot come soon is not waited for."""
        patience_s = self._matchmaker.patience_s(key)

        async def meet(_: object) -> T:
            party = await self._matchmaker.meet(wanted, key, step, weight, anchor_digest, patience_s)
            IN_BACKGROUND.set(True)
            return await asyncio.to_thread(then, party)

        return self._begin(wanted, meet)

    def paced(self, step: int, every: int) -> int:
        """See ElasticNetwork."""
        if self._snapshots.due and self._source:
            self._snapshots.give(self._source())
        counted = counted_step(step, every, self.peers.members)
        self.peers.info.update(trains=True, rate=self._pace.step(self.now()), step=counted)
        return counted

    def expect_model(self, shapes: str, values: int) -> None:
        """Announces the model, by a hash of its shapes and its number of values, once it is known.

        Raises UserError when the run's peers have another.
        """
        others = {member.shapes for member in self.peers.members.all() if member.shapes}
        if others and shapes not in others:
            raise UserError(OTHER_SHAPES)
        self.peers.info["shapes"] = shapes
        self._transport.largest = BYTES_A_VALUE * values + ROOM
        self._states.largest = 4 * BYTES_A_VALUE * values + ROOM

    def serve(self, source: Callable[[], SharedState]) -> None:
        """See ElasticNetwork."""
        self._source = source

    def behind(self, step: int) -> float | None:
        """How many steps the others are ahead of one; None when nobody else trains."""
        median = self.peers.members.median_step()
        return None if median is None else median - step

    def prefetch(self, identical: bool) -> None:
        """Starts the download that the next `fetch` yields."""
        self._prefetched = self.fetch(identical)

    def fetch(self, identical: bool) -> Pending[SharedState]:
        """See ElasticNetwork."""
        begun, self._prefetched = self._prefetched, None
        return begun or self._begin(self.members(), lambda _: self._states.fetch(identical))

    def accept(self) -> None:
        """See ElasticNetwork."""
        self._states.accept()

    def reject(self, state: SharedState, why: str) -> None:
        """See ElasticNetwork."""
        for rank in state.givers:
            if member := self.peers.members.by_rank.get(rank):
                self._states.refuse(member, "bad state", why)

    def blame(self, rank: int, why: str) -> None:
        """See ElasticNetwork."""
        if member := self.peers.members.by_rank.get(rank):
            self.peers.guard.strike(member.peer, "bad message", f"{member.described}: {why}")

    def tell_others(self, **facts: float) -> None:
        """See ElasticNetwork."""
        self.peers.info["facts"] = {**self.peers.info["facts"], **facts}

    def address(self, rank: int) -> str:
        """A replica's name in messages."""
        member = self.peers.members.by_rank.get(rank)
        return member.described if member else f"replica {rank} (unknown here)"

    def invitation(self) -> Ticket:
        """The run's ticket as it is now: to this peer and the others that are there."""
        return self.peers.ticket.at(self.peers.addresses)

    def close(self) -> None:
        """Leaves the run."""
        self.peers.close()

    async def _combined(self, packets: Packets, combine: Combine, transfer: Transfer[Any], key: str) -> Packets:
        half = self._deadline / 2  # the other half of the time is for the way back
        await self._transport.swap(packets, transfer, f"{key}, to be combined", half)
        received = {rank: transfer.delivered.pop(rank) for rank in sorted(transfer.delivered)}
        combined = await asyncio.to_thread(combine, received)
        await self._transport.swap(dict.fromkeys(received, combined), transfer, f"{key}, combined", half)
        return transfer.all_with(combined)

    def _begin(self, group: Group, work: Callable[[Transfer[T]], Awaitable[T]]) -> Transfer[T]:
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


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)
