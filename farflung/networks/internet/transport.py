"""Packets from peer to peer: announced, signed, expected, checked, and dropped if they differ from the announcement."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from farflung.networks.base import Packets, Traffic
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PeerStream, RequestRefusedError
from farflung.networks.peers.frames import (
    SLOWEST,
    Frame,
    FrameError,
    digest,
    entry,
    name_in,
    plain,
    read_payload,
    reading,
    write_payload,
)
from farflung.networks.peers.identity import signed_by
from farflung.networks.peers.member import LONGEST_WORD, Member
from farflung.networks.transfer import Transfer

REMEMBERED = 1 << 16
"""Packets whose names are kept, to know them again."""

STRIPES = 4
"""Streams that a large packet travels on at a time: the window of one is soon full while data goes both ways."""
STRIPED = 1 << 23
"""Bytes from which a packet is large."""
AT_A_TIME = 3
"""Packets that are on their way to a member at a time: the first shall have come while the last are on the wire."""
UNASKED = 1 << 18
"""Bytes that follow an announcement at once, as much as a stream holds unread: the answer may be long on its way,
behind packets that come from there."""

ASK_SECONDS = 3.0
"""How often one that has packets to send, and sends none just now, is asked whether it is still there."""

LARGEST_MESSAGE = 1 << 33
"""Bytes of the largest message, before the model is known."""
BYTES_A_VALUE = 16
"""The largest message of a model, for each of its values."""
ROOM = 1 << 20
"""Bytes that a packet may be larger than expected."""

Address = tuple[int, str]
"""Whose packet, and which."""


class PacketLostError(Exception):
    """A packet is lost; says why, and whether the peer is `gone`."""

    def __init__(self, reason: str, gone: bool = False) -> None:
        super().__init__(plain(reason))
        self.gone = gone


@dataclass
class Arriving:
    """A packet on its way, who waits for it, and the stripes of it that nobody has begun to send yet."""

    content: memoryview
    packet: asyncio.Future[Tensor]
    missing: dict[int, asyncio.Event]


class PacketTransport:
    """Sends and receives this peer's packets; all methods run in the peers' thread.

    No packet of more than `largest` bytes is taken; after `stall_s` seconds without a byte, a transfer is given up. One
    that comes before anybody waits for it has as long to wait, unless given `early_s`.
    """

    def __init__(self, peers: Peers, largest: int, stall_s: float, early_s: float | None = None) -> None:
        self.largest = largest + ROOM
        self.traffic = Traffic()
        self._peers = peers
        self._stall_s = stall_s
        self._early_s = early_s
        self._awaited: dict[Address, asyncio.Future[Tensor]] = {}
        self._early: dict[Address, asyncio.Event] = {}
        self._taken: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._arriving: dict[Address, Arriving] = {}
        self.unacknowledged = set[asyncio.Task[None]]()
        """What was sent, and may not have come yet."""
        self._turns = WeakValueDictionary[int, asyncio.Semaphore]()
        peers.handlers["packet"] = self._on_packet
        peers.handlers["stripe"] = self._on_stripe

    def expect_values(self, values: int) -> None:
        """Takes no larger messages than a model of so many values needs."""
        self.largest = BYTES_A_VALUE * values + ROOM

    async def swap(
        self, packets: Packets, transfer: Transfer[Any], key: str, deadline: float, seats: Mapping[int, int]
    ) -> None:
        """Sends each its packet and takes each one's: who fails in that is lost, the rest goes on.

        The `seats` are the ranks of the peers by which replicas do that, where these are others.
        """
        swaps = (
            self._swap_with(rank, seats.get(rank, rank), packet, transfer, key, deadline)
            for rank, packet in packets.items()
        )
        await asyncio.gather(*swaps)

    def expect(self, sender: int, key: str) -> asyncio.Future[Tensor]:
        """The packet of a sender under a key, from now on taken when it comes; `forget` ends that."""
        address = sender, key
        self._awaited[address] = asyncio.get_running_loop().create_future()
        if address in self._early:
            self._early[address].set()
        return self._awaited[address]

    def forget(self, sender: int, key: str) -> None:
        """Takes that packet no longer."""
        if (future := self._awaited.pop((sender, key), None)) and not future.done():
            future.cancel()

    async def send(self, member: Member, key: str, packet: Tensor, deadline_s: float) -> None:
        """Puts a packet (flat uint8, on the CPU) on its way, all of it. Raises PacketLostError."""
        underway: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        delivery = self._peers.background.spawn(self._deliver(member, key, packet, deadline_s, underway))
        try:
            await underway
        except asyncio.CancelledError:
            delivery.cancel()
            raise
        self.traffic.sent(packet.numel())
        self.unacknowledged.add(delivery)
        delivery.add_done_callback(self.unacknowledged.discard)

    async def receipts(self) -> None:
        """Waits until all that was sent has come, or its receivers are silent: who leaves earlier may cut it off."""
        await asyncio.gather(*self.unacknowledged)

    async def _swap_with(
        self, rank: int, seat: int, packet: Tensor, transfer: Transfer[Any], key: str, deadline: float
    ) -> None:
        awaited = self.expect(seat, key)
        member = await self._peers.found(seat, deadline)
        if member is None:
            self.forget(seat, key)
            transfer.lost[rank] = "it is not there"
            return
        partner = self._peers.liable(member.peer)
        try:
            async with asyncio.timeout(deadline):
                sending = asyncio.ensure_future(self.send(member, key, packet.cpu(), deadline))
                try:
                    await asyncio.gather(sending, self._comes(awaited, member))
                finally:
                    sending.cancel()
                    if awaited.done() and not awaited.cancelled() and not awaited.exception():
                        transfer.delivered[rank] = awaited.result()
                self._peers.guard.delivered(partner)
        except (PacketLostError, TimeoutError) as error:
            transfer.lost[rank] = plain(str(error)) or f"it did not deliver within {deadline:g} s"
            self._peers.guard.missed(partner)
            if isinstance(error, PacketLostError) and error.gone:
                self._peers.members.failed(seat)
        finally:
            self.forget(seat, key)

    async def _comes(self, awaited: asyncio.Future[Tensor], member: Member) -> None:
        """Waits for a packet. Raises PacketLostError, also when its sender has died before it began to send."""
        while not (await asyncio.wait([awaited], timeout=ASK_SECONDS))[0]:
            sends = any(sender == member.rank for sender, _ in self._arriving)
            if not sends and not await self._peers.still_there(member):
                raise PacketLostError("it has gone")
        awaited.result()

    async def _deliver(
        self, member: Member, key: str, packet: Tensor, deadline_s: float, underway: asyncio.Future[None]
    ) -> None:
        """Announces a packet, sends it, and waits for the receipt, for which the sender need not wait."""
        try:
            await self._send_all(member, key, packet.numpy().data, deadline_s, underway)
        except TimeoutError:
            lost = PacketLostError("it did not take its packet in time")
        except (RequestRefusedError, FrameError) as error:
            lost = PacketLostError(str(error))
        except UNREACHABLE as error:
            lost = PacketLostError(_fault(error), gone=True)
        except Exception as error:  # who waits must hear of it, whatever it is
            lost = PacketLostError(f"it could not be sent: {error}")
        else:
            return
        if not underway.done():
            underway.set_exception(lost)

    async def _send_all(
        self, member: Member, key: str, payload: memoryview, deadline_s: float, underway: asyncio.Future[None]
    ) -> None:
        header = {
            "to": member.rank,
            "key": key,
            "size": len(payload),
            "digest": await asyncio.to_thread(digest, payload),
        }
        turn = self._turns.setdefault(member.rank, asyncio.Semaphore(AT_A_TIME))
        async with contextlib.AsyncExitStack() as stack:
            async with turn:  # before it is announced: a receiver waits only so long for the next byte
                stream = await stack.enter_async_context(self._peers.stream(member))
                await stream.tell(self.announcement(header))
                await write_payload(stream.writer, stripe(payload, 0)[:UNASKED], self._stall_s)
                await stream.hear(deadline_s)
                await self._send_stripes(member, key, payload, stream)
            if not underway.done():
                underway.set_result(None)
            await stream.hear(self._stall_s)

    async def _send_stripes(self, member: Member, key: str, payload: memoryview, stream: PeerStream) -> None:
        """Sends what is left of a packet that is taken."""
        rest = [
            asyncio.create_task(self._send_stripe(member, key, payload, number))
            for number in range(1, stripes(len(payload)))
        ]
        try:
            await write_payload(stream.writer, stripe(payload, 0)[UNASKED:], self._stall_s)
            await asyncio.gather(*rest)
        finally:
            for task in rest:
                task.cancel()

    async def _send_stripe(self, member: Member, key: str, payload: memoryview, number: int) -> None:
        async with self._peers.stream(member) as stream:
            await stream.tell({"kind": "stripe", "key": key, "number": number})
            await write_payload(stream.writer, stripe(payload, number), self._stall_s)
            await stream.hear(self._stall_s)

    def announcement(self, packet: Frame) -> Frame:
        """What is said of a packet, and by whom, signed."""
        own, session = self._peers.identity.rank, self._peers.info["session"]
        sender = {"kind": "packet", "run": self._peers.ticket.run, "sender": own, "session": session}
        return {**sender, **packet, "signature": self._peers.identity.sign(_text(sender | packet))}

    async def _on_packet(self, stream: PeerStream, frame: Frame) -> None:
        sender, key, name = self._checked(stream.member, frame)
        packet = await self._awaited_packet(sender, key)
        if name in self._taken:
            raise FrameError(f"a packet was sent again: {key}")
        self._taken[name] = None
        while len(self._taken) > REMEMBERED:
            self._taken.popitem(last=False)
        try:
            await self._receive(stream, frame, packet)
        except BaseException as error:
            if not packet.done():
                packet.set_exception(PacketLostError(_fault(error)))
                packet.exception()  # who waits for it may have gone
            raise

    @reading("a packet's announcement")
    def _checked(self, member: Member, frame: Frame) -> tuple[int, str, tuple[str, int, str]]:
        """Whose packet this is, and which. Raises FrameError when it is not what it says, or unwanted."""
        key, sender, size = name_in(frame, "key"), entry(frame, "sender", int), entry(frame, "size", int)
        entry(frame, "digest", str)
        header = {name: value for name, value in frame.items() if name != "signature"}
        wanted = member.rank, self._peers.ticket.run, self._peers.identity.rank
        if (sender, frame.get("run"), frame.get("to")) != wanted:
            raise FrameError("a packet is not from who sends it, not of this run, or for somebody else")
        if not signed_by(member.peer, entry(frame, "signature", str), _text(header)):
            raise FrameError("a packet's signature is not its sender's")
        if not 0 <= size <= self.largest:
            fault = f"a packet says that it has {size} bytes; at most {self.largest} are taken"
            if (awaited := self._awaited.get((sender, key))) and not awaited.done():
                awaited.set_exception(PacketLostError(fault))
                awaited.exception()  # who waits for it may have gone
            raise FrameError(fault)
        name = name_in(frame, "session", LONGEST_WORD), sender, key
        if name in self._taken:
            raise FrameError(f"a packet was sent again: {key}")
        return sender, key, name

    async def _awaited_packet(self, sender: int, key: str) -> asyncio.Future[Tensor]:
        """The slot of an expected packet; an early packet waits with its sender, unread. Raises RequestRefusedError."""
        address = sender, key
        if address in self._early or address in self._arriving:
            raise FrameError(f"a packet was announced twice: {key}")
        if address not in self._awaited:
            self._early[address] = asyncio.Event()
            try:
                async with asyncio.timeout(self._early_s or self._stall_s):
                    await self._early[address].wait()
            except TimeoutError:
                raise RequestRefusedError(f"nobody waits for {key} here") from None
            finally:
                del self._early[address]
        return self._awaited[address]

    async def _receive(self, stream: PeerStream, frame: Frame, packet: asyncio.Future[Tensor]) -> None:
        buffer = torch.empty(frame["size"], dtype=torch.uint8)
        content = buffer.numpy().data
        address = stream.member.rank, frame["key"]
        arrivals = {number: asyncio.Event() for number in range(1, stripes(len(content)))}
        awaited = list(arrivals.values())
        self._arriving[address] = Arriving(content, packet, arrivals)
        try:
            await stream.tell({"go": True})
            async with asyncio.timeout(self._stall_s + len(content) / SLOWEST):
                await while_awaited(packet, self._come(stream, content, awaited))
        finally:
            del self._arriving[address]
        if await asyncio.to_thread(digest, content) != frame.get("digest"):
            raise FrameError("a packet's bytes are not those that were announced")
        self.traffic.received(len(content))
        if not packet.done():
            packet.set_result(buffer)
        await stream.tell({"taken": True})

    async def _come(self, stream: PeerStream, content: memoryview, others: Sequence[asyncio.Event]) -> None:
        """Waits for the first stripe, and the others."""
        await read_payload(stream.reader, stripe(content, 0), self._stall_s, SLOWEST)
        for arrival in others:
            await arrival.wait()

    async def _on_stripe(self, stream: PeerStream, frame: Frame) -> None:
        """Takes a part of a packet that has been announced, once."""
        arriving = self._arriving.get((stream.member.rank, entry(frame, "key", str)))
        number = entry(frame, "number", int)
        if arriving is None or number not in arriving.missing:
            raise RequestRefusedError("no such part of a packet is awaited")
        arrival = arriving.missing.pop(number)
        coming = read_payload(stream.reader, stripe(arriving.content, number), self._stall_s, SLOWEST)
        await while_awaited(arriving.packet, coming)
        arrival.set()
        await stream.tell({"taken": True})


async def while_awaited(packet: asyncio.Future[Tensor], coming: Coroutine[Any, Any, None]) -> None:
    """Waits for what comes of a packet, as long as somebody waits for that: its memory is freed then.

    Raises RequestRefusedError when nobody does.
    """
    work: asyncio.Future[Any] = asyncio.ensure_future(coming)
    awaited: list[asyncio.Future[Any]] = [work, packet]
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise RequestRefusedError("nobody waits for this packet any more")
        work.result()
    finally:
        work.cancel()
        await asyncio.wait([work])  # until then nobody else may read


def stall_of(deadline_s: float) -> float:
    """The seconds without a byte after which a transfer is given up."""
    return max(5.0, min(15.0, deadline_s / 4))


def stripes(size: int) -> int:
    """How many streams a packet of so many bytes travels on."""
    return STRIPES if size >= STRIPED else 1


def stripe(content: memoryview, number: int) -> memoryview:
    """The part of a packet that travels on one stream."""
    count, size = stripes(len(content)), len(content)
    return content[number * size // count : (number + 1) * size // count]


def _fault(error: BaseException) -> str:
    """What broke a transfer off; of a connection that ended, asyncio tells the bytes that it had wanted."""
    return "the connection broke" if isinstance(error, EOFError) else str(error) or "the connection broke"


def _text(header: Frame) -> bytes:
    return json.dumps(header, sort_keys=True).encode()
