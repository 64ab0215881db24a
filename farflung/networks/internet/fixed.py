"""Peers that work together from a first exchange to a last one: so many come, and then nobody joins or leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar

from farflung.durations import duration
from farflung.errors import UserError, counted
from farflung.networks.base import Group
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.internet.examination import answer_probes
from farflung.networks.internet.exchanges import Exchanges
from farflung.networks.internet.transport import PacketTransport, stall_of
from farflung.networks.peers.addresses import peers_at
from farflung.networks.peers.frames import Frame, FrameError, entry, plain, reading, whole
from farflung.networks.peers.identity import rank_of
from farflung.networks.peers.member import LAST_RANK
from farflung.networks.peers.ticket import Ticket
from farflung.networks.transfer import Transfer

T = TypeVar("T")

SEAT = "seat"
"""The request for a seat."""
ASK_SECONDS, FREE_SECONDS = 1.0, 15.0
"""How often one that waits asks for its seat, and how long after it has asked last another may have it."""
START_SECONDS = 120.0
"""How long the first peer is called, and how long the others are, once all have come."""
TELL_SECONDS = 300.0
"""How often it is told how many are there, where nobody comes, and whom an exchange waits for."""


class FixedGroup(Exchanges):
    """A seat among `size` peers, the same ones from the first exchange to the last; `gather` waits for them.

    The first peer, to which the ticket leads, gives out the seats.

    Args:
        peers: this peer's, which are started here.
        size: how many there are, this one among them.
        largest: bytes of the largest packet that is taken.
        deadline: seconds that others are waited for in an exchange.

    Raises UserError where nobody answers, or they do not want this peer.
    """

    def __init__(self, peers: Peers, size: int, largest: int, deadline: float) -> None:
        transport = PacketTransport(peers, largest, stall_of(deadline), early_s=deadline)
        super().__init__(peers.identity.rank, peers, transport, deadline, seats={})
        self._size = size
        self._came: dict[int, float] = {}
        """When each of the others has asked the first peer for its seat."""
        self._group: Group = ()
        """All, once they have come."""
        self._tell: Callable[[str], object] = peers.tell
        self._first = next(iter(peers_at(peers.ticket.addresses)), None)
        self._heard: tuple[float, Group] = (0.0, (self.rank,))
        """When the first peer has answered last, and who had come."""
        answer_probes(peers)
        if self._first is None:
            peers.handlers[SEAT] = self._on_seat
        peers.start(START_SECONDS)

    def invitation(self) -> Ticket:
        """The ticket that leads to this peer."""
        return self.peers.ticket.at(self.peers.addresses)

    def gather(self, seconds: float, tell: Callable[[str], object]) -> None:
        """Waits until all are there, and can be called; tells how many are there. Raises UserError."""
        there, told = 0, 0.0
        began = self.now()
        self._tell = tell
        self._heard = began, (self.rank,)
        while len(seated := self._seated()) < self._size:
            self.peers.check()
            if len(seated) != there or self.now() - told > TELL_SECONDS:
                there, told = len(seated), self.now()
                tell(f"{there} of {self._size} machines are there")
            if self.now() - began > seconds:
                raise UserError(
                    f"{there} of {self._size} machines have come in {duration(seconds)}; start it again on all of them"
                )
            time.sleep(ASK_SECONDS)
        self._seats = {rank: rank for rank in seated}
        self._find_all()
        tell(f"all {self._size} machines are there")
        self.peers.tell = lambda _: None  # who is lost, exchanges tell; who has left at the end, nobody needs to know

    def begin(self, group: Group, work: Callable[[Transfer[T]], Awaitable[T]]) -> Transfer[T]:
        """Starts work in the peers' thread, and tells whom it waits for, if that is long."""

        async def telling(transfer: Transfer[T]) -> T:
            teller = asyncio.create_task(self._tell_of(transfer))
            try:
                return await work(transfer)
            finally:
                teller.cancel()

        return super().begin(group, telling)

    async def _tell_of(self, transfer: Transfer[Any]) -> None:
        """Nobody else can say whether a machine that answers is slow, or hangs."""
        began = self.now()
        while True:
            await asyncio.sleep(TELL_SECONDS)
            names = ", ".join(map(self.address, transfer.late()))
            limits = f"{duration(self.now() - began)} so far, at most {duration(self._deadline)}"
            self._tell(f"still waiting for {names}: {limits}; look there whether it still works")

    def close(self) -> None:
        """Leaves, once the others have what was sent."""
        if self._transport.unacknowledged:
            with suppress(TimeoutError):
                self.peers.background.run(self._transport.receipts(), START_SECONDS)
        self.peers.close()

    def _find_all(self) -> None:
        """Waits until this peer has spoken with all of the group. Raises UserError."""
        ends = self.now() + START_SECONDS
        while unknown := {*self.members()} - {self.rank, *(one.rank for one in self.peers.members.proven())}:
            if self.now() > ends:
                raise UserError(
                    f"{counted(len(unknown), 'machine')} of the {self._size} cannot be called from this one; see that "
                    "they can call each other, and start it again on all of them"
                )
            time.sleep(ASK_SECONDS)

    def _seated(self) -> Collection[int]:
        """Who has come. Raises UserError where the seats are taken, or the first peer has gone."""
        if self._first is None:
            return self._group or {self.rank, *self._lately()}
        try:
            answer = self.peers.background.run(self._asked_for_seat(rank_of(self._first)), 2 * PROMPT_SECONDS)
            self._heard = self.now(), self._seats_in(answer)
        except RequestRefusedError as refusal:
            raise UserError(str(refusal)) from refusal
        except FrameError as error:
            raise UserError(f"the machine that has made the ticket gives no seats: {plain(str(error))}") from error
        except UNREACHABLE as error:
            if self.now() - self._heard[0] > FREE_SECONDS:
                raise UserError(
                    "the machine that has made the ticket has gone; start it again on all machines, with its new ticket"
                ) from error
        return self._heard[1]

    async def _asked_for_seat(self, first: int) -> Frame:
        member = await self.peers.found(first, PROMPT_SECONDS)
        if member is None:
            raise TimeoutError
        return await self.peers.ask(member, {"kind": SEAT})

    @reading("who has a seat")
    def _seats_in(self, answer: Frame) -> Group:
        """The ranks in the first peer's answer. Raises FrameError."""
        seated = {whole(rank, LAST_RANK) for rank in entry(answer, "seated", list)}
        if self.rank not in seated or len(seated) > self._size:
            raise FrameError("it leaves this machine out, or gives more seats than there are")
        return tuple(sorted(seated))

    async def _on_seat(self, stream: PeerStream, _: Frame) -> None:
        """The first peer gives one that asks its seat, while there are any."""
        asks = stream.member.rank
        if not self._group:
            self._came = {**self._lately(), asks: self.now()}
            if len(self._came) + 1 == self._size:
                self._group = tuple(sorted((self.rank, *self._came)))
        if self._group and asks not in self._group:
            raise RequestRefusedError(f"all {self._size} machines are there, and have begun without this one")
        await stream.tell({"seated": [*(self._group or (self.rank, *self._came))]})

    def _lately(self) -> dict[int, float]:
        """Who has asked for a seat lately, and when."""
        return {rank: at for rank, at in self._came.items() if self.now() - at < FREE_SECONDS}
