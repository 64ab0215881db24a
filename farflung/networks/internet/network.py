"""Replicas as peers on the open internet, that come and go: hivemind's DHT and libp2p streams."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.networks.base import (
    Combine,
    Finished,
    Group,
    Packets,
    Party,
    Pending,
    SharedState,
    Traffic,
    mean_in_order,
)
from farflung.networks.internet.admission import OTHER_SHAPES
from farflung.networks.internet.fetching import Fetching
from farflung.networks.internet.frames import Frame
from farflung.networks.internet.host import Seat
from farflung.networks.internet.identity import Identity
from farflung.networks.internet.matchmaker import Matchmaker
from farflung.networks.internet.members import Member
from farflung.networks.internet.pace import Pace, counted_step
from farflung.networks.internet.post import PacketLostError, Post
from farflung.networks.internet.probe import answer_probes
from farflung.networks.internet.snapshots import Snapshots
from farflung.networks.internet.swarm import Swarm
from farflung.networks.internet.ticket import Ticket
from farflung.networks.internet.transfer import Transfer

T = TypeVar("T")

PATIENCE = 0.25
"""What part of the time between two rounds a peer waits for others to come to one."""
FIRST_ROUND = 20.0
"""Seconds that a round is taken to last before one has been seen."""
BYTES_A_VALUE = 16
"""The largest message of a model, for each of its values."""
ROOM = 1 << 20
"""Bytes that a packet may be larger than expected."""


log = logging.getLogger(__name__)


class InternetNetwork:
    """A peer's seat in a run on the internet. Its rank is a number made of its key.

    Args:
        ticket: the run's.
        identity: this peer's key.
        seat: where it listens.
        about: what others must agree to: `settings`, `shapes`; its `version`, `host`, and whether it `trains`.
        largest: bytes of the largest message that is taken.
        deadline: the longest that others are waited for, in seconds.
        tell: told in one line what a user should know; unset, farflung's logger is.
        listed: whether others are to know of it.

    Raises UserError when there is nobody to join, or they do not want this peer.
    """

    def __init__(
        self,
        ticket: Ticket,
        identity: Identity,
        seat: Seat,
        about: Frame,
        *,
        largest: int,
        deadline: float = 120.0,
        tell: Callable[[str], None] = log.warning,
        listed: bool = True,
    ) -> None:
        self.ticket = ticket
        self.rank = identity.rank
        self.traffic = Traffic()
        self.deadline = deadline
        self.swarm = Swarm(ticket, identity, seat, about, tell, listed)
        stall = max(5.0, min(15.0, deadline / 4))
        self._post = Post(self.swarm, ticket.run, largest + ROOM, stall, self.traffic)
        self._matchmaker = Matchmaker(self.swarm)
        answer_probes(self.swarm)
        self._snapshots = Snapshots(self.swarm, stall)
        self._states = Fetching(self.swarm, 4 * largest + ROOM, stall, tell)
        self._source: Callable[[], SharedState] | None = None
        self._met: dict[str, float] = {}
        self.background = threading.local()
        self._fetching: Transfer[SharedState] | None = None
        self._pace = Pace()
        self._attachments = itertools.count()
        self.swarm.start(deadline)

    @property
    def refused(self) -> Mapping[str, int]:
        """See ElasticNetwork."""
        return self.swarm.guard.refused

    def members(self) -> Group:
        """Those that train and were heard of lately, and this one."""
        return tuple(sorted({self.rank, *(member.rank for member in self.swarm.members.training())}))

    def attachment(self) -> int:
        """See Network."""
        return next(self._attachments)

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.now())
        return Transfer(self, group, lambda transfer: self._exchange(packet, transfer, key))

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network. Combines in a thread of its own."""
        return Transfer(self, group, lambda transfer: self._scatter_combine_gather(packets, combine, transfer, key))

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each member averages one part."""
        if group == (self.rank,):
            return Finished(tensor, self.now())
        return Transfer(self, group, lambda transfer: self._all_reduce(tensor, transfer, key))

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """See ElasticNetwork. Who cannot come soon is not waited for."""
        stream = key.rpartition(" of ")[2]
        between = self.now() - self._met.get(stream, self.now() - FIRST_ROUND)
        self._met[stream] = self.now()
        patience = min(max(1.0, PATIENCE * between), self.deadline / 2)

        async def meet(_: object) -> T:
            party = await self._matchmaker.meet(wanted, key, step, weight, lineage, patience)
            return await asyncio.to_thread(self._in_background, then, party)

        return Transfer(self, wanted, meet)

    def _in_background(self, then: Callable[[Party], T], party: Party) -> T:
        self.background.on = True
        try:
            return then(party)
        finally:
            self.background.on = False

    def paced(self, step: int, every: int) -> int:
        """See ElasticNetwork."""
        if self._snapshots.due and self._source:
            self._snapshots.give(self._source())
        about = self.swarm.about
        about["trains"] = True
        about["rate"] = self._pace.step(self.now())
        about["step"] = counted_step(step, every, self.swarm.members)
        return int(about["step"])

    def expect(self, shapes: str, values: int) -> None:
        """Says what the model is like, by a hash of its shapes and how many values they hold, once that is known.

        Raises UserError when the run's peers have another.
        """
        others = {member.shapes for member in self.swarm.members.all() if member.shapes}
        if others and shapes not in others:
            raise UserError(OTHER_SHAPES)
        self.swarm.about["shapes"] = shapes
        self._post.largest = BYTES_A_VALUE * values + ROOM
        self._states.largest = 4 * BYTES_A_VALUE * values + ROOM

    def serve(self, source: Callable[[], SharedState]) -> None:
        """See ElasticNetwork."""
        self._source = source

    def behind(self, step: int) -> float | None:
        """How many steps the others are ahead of one; None when nobody else trains."""
        lead = self.swarm.members.lead()
        return None if lead is None else lead - step

    def fetch(self, alike: bool) -> Pending[SharedState]:
        """See ElasticNetwork. One that is under way is joined."""
        if self._fetching is None or self._fetching.taken:
            self._fetching = Transfer(self, self.members(), lambda _: self._states.fetch(alike))
        return self._fetching

    def reject(self, state: SharedState, why: str) -> None:
        """See ElasticNetwork."""
        for rank in state.givers:
            if member := self.swarm.members.by_rank.get(rank):
                self._states.refuse(member, "bad state", why)

    def blame(self, rank: int, why: str) -> None:
        """See ElasticNetwork."""
        if member := self.swarm.members.by_rank.get(rank):
            self.swarm.guard.strike(member.peer, "bad message", f"{member.described}: {why}")

    def tell_others(self, **facts: float) -> None:
        """See ElasticNetwork."""
        self.swarm.about["facts"] = {**self.swarm.about["facts"], **facts}

    def advance(self) -> None:
        """Nothing: the wall clock has already advanced."""

    def now(self) -> float:
        """The process's monotonic clock, seconds."""
        return time.monotonic()

    def address(self, rank: int) -> str:
        """How to call a replica in a message."""
        member = self.swarm.members.by_rank.get(rank)
        return member.described if member else f"replica {rank} (unknown here)"

    def invitation(self) -> Ticket:
        """The run's ticket as it is now: to this peer and the others that are there."""
        return self.ticket.at(self.swarm.addresses)

    def close(self) -> None:
        """Leaves the swarm."""
        self.swarm.close()

    async def _exchange(self, packet: Tensor, transfer: Transfer[Packets], key: str) -> Packets:
        await self._swap(dict.fromkeys(transfer.others, packet), transfer, key)
        transfer.delivered[self.rank] = packet
        transfer.raise_if_lost()
        return {rank: transfer.delivered[rank] for rank in transfer.group}

    async def _scatter_combine_gather(
        self, packets: Packets, combine: Combine, transfer: Transfer[Any], key: str
    ) -> Packets:
        # The second half of the time is for the second half of the way.
        await self._swap(packets, transfer, f"{key}, to be combined", self.deadline / 2)
        received = {rank: transfer.delivered.pop(rank) for rank in sorted(transfer.delivered)}
        combined = await asyncio.to_thread(combine, received)
        await self._swap(dict.fromkeys(received, combined), transfer, f"{key}, combined", self.deadline / 2)
        transfer.delivered[self.rank] = combined
        transfer.raise_if_lost()
        return {rank: transfer.delivered[rank] for rank in transfer.group}

    async def _all_reduce(self, tensor: Tensor, transfer: Transfer[Tensor], key: str) -> Tensor:
        group, flat = transfer.group, tensor.view(-1)
        parts = dict(zip(group, torch.tensor_split(flat, len(group)), strict=True))
        packets = {rank: _bytes_of(parts[rank]) for rank in transfer.others}

        def combine(received: Packets) -> Tensor:
            own = parts[self.rank]
            if len(received) < len(group) - 1 or any(len(p) != own.nbytes for p in received.values()):
                return _bytes_of(own)
            values = {rank: packet.view(tensor.dtype) for rank, packet in received.items()} | {self.rank: own}
            return _bytes_of(mean_in_order([values[rank] for rank in group]))

        combined = await self._scatter_combine_gather(packets, combine, transfer, key)
        for rank, part in parts.items():
            part.copy_(combined[rank].view(tensor.dtype).to(part.device))
        return tensor

    async def _swap(self, packets: Packets, transfer: Transfer[Any], key: str, deadline: float | None = None) -> None:
        """Sends each its packet and takes each one's; who fails in one is lost, the rest goes on."""
        limit = deadline or self.deadline
        await asyncio.gather(*(self._swap_with(rank, packet, transfer, key, limit) for rank, packet in packets.items()))

    async def _swap_with(self, rank: int, packet: Tensor, transfer: Transfer[Any], key: str, deadline: float) -> None:
        awaited = self._post.expect(rank, key)
        member = await self._found(rank, deadline)
        try:
            async with asyncio.timeout(deadline):
                if member is None:
                    raise PacketLostError("it is not there")
                sending = asyncio.ensure_future(self._post.send(member, key, packet.cpu(), deadline))
                try:
                    await asyncio.gather(sending, awaited)
                finally:
                    sending.cancel()
                    if awaited.done() and not awaited.cancelled() and not awaited.exception():
                        transfer.delivered[rank] = awaited.result()
        except (PacketLostError, TimeoutError) as error:
            transfer.lost[rank] = str(error) or f"it did not deliver within {deadline:g} s"
            if isinstance(error, PacketLostError) and error.gone:
                self.swarm.members.failed(rank)
        finally:
            self._post.forget(rank, key)

    async def _found(self, rank: int, deadline: float) -> Member | None:
        """A peer of the group; one that others have heard of first is waited for a moment."""
        for _ in range(int(min(5.0, deadline) * 10)):
            if member := self.swarm.members.by_rank.get(rank):
                return member
            await asyncio.sleep(0.1)
        return None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)
