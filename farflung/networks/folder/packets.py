"""Exchanges of packets through a folder: each writes one object, and reads its part of the others'."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.networks.base import Combine, Finished, Group, Packets, PeerLostError, Pending, mean_in_order
from farflung.networks.folder.bundles import Bundles
from farflung.networks.folder.meetings import FIRST_PAUSE
from farflung.networks.folder.notes import Listing, Written
from farflung.networks.folder.presence import Presence
from farflung.networks.folder.sealing import OVERHEAD, Kind, SealError
from farflung.networks.folder.store import StoreAwayError
from farflung.networks.peers.circles import averages_all
from farflung.networks.peers.frames import plain
from farflung.networks.reduction import Reduction, bytes_of
from farflung.networks.transfer import RealNetwork, Transfer

T = TypeVar("T")

LARGEST_MESSAGE = 1 << 33
"""Bytes of the largest message, before the model is known."""
BYTES_A_VALUE = 16
"""The largest message of a model, for each of its values."""
ROOM = 1 << 20
"""Bytes that a packet may be larger than expected."""
ROUND: ContextVar[bytes] = ContextVar("round", default=b"")
"""The subject of the round at which this thread exchanges packets."""
BUNDLING = 2
"""What another one takes to read and bundle packets, at least, in times of what this peer takes to write its own."""
LATE_SHARE = 0.25
"""How long bundles are waited for, as a part of the time for all."""
PAUSE_SHARE, PAUSE_OF_MANY, LONGEST_PAUSE = 0.15, 0.3, 2.0
"""A pause between two looks for packets, as a part of the time since this peer has begun to write, among few and where
there are bundles; seconds at most."""


class PacketExchanges(RealNetwork):
    """See Network. Others are waited for at most `deadline` seconds."""

    islands = None
    processes: tuple[int, ...] = ()
    worth_a_packet = 1 << 20

    def __init__(self, presence: Presence, deadline: float) -> None:
        super().__init__()
        self.rank = presence.identity.rank
        self.peers = presence
        self.traffic = presence.traffic
        self.largest = LARGEST_MESSAGE
        self._deadline = deadline
        self._kept: list[tuple[str, float, bytes]] = []
        """Packets that others may still want, until when, and of which round."""
        presence.tidying.append(self._sweep)

    def address(self, rank: int) -> str:
        """A replica's name in messages."""
        member = self.peers.members.by_rank.get(rank)
        return member.described if member else f"replica {rank} (unknown here)"

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.now())

        def work(transfer: Transfer[Packets]) -> Packets:
            self._swap(dict.fromkeys(transfer.others, packet), transfer, key, self._deadline, bundled=True)
            return transfer.all_with(packet)

        return self.begin(group, work)

    def all_to_all(self, packets: Packets, group: Group, key: str) -> Pending[Packets]:
        """See Network."""

        def work(transfer: Transfer[Packets]) -> Packets:
            self._swap(packets, transfer, key, self._deadline)
            return transfer.all_received()

        return self.begin(group, work)

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network."""
        return self.begin(group, lambda transfer: self._combined(packets, combine, transfer, key))

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each of several members averages one part; of two, or of little, each averages all."""
        if group == (self.rank,):
            return Finished(tensor, self.now())

        def whole(transfer: Transfer[Tensor]) -> Tensor:
            self._swap(dict.fromkeys(transfer.others, bytes_of(tensor)), transfer, key, self._deadline, bundled=True)
            flat = tensor.view(-1)
            packets = transfer.all_with(bytes_of(flat))
            if any(len(packet) != flat.nbytes for packet in packets.values()):
                raise PeerLostError(transfer.others, "its packet has another size")
            values = [packets[member].view(tensor.dtype).to(tensor.device) for member in group]
            flat.copy_(mean_in_order(values))
            return tensor

        at_once = averages_all(len(group), tensor.nbytes)
        return self.begin(group, whole if at_once else lambda transfer: self._parts(tensor, transfer, key))

    def _parts(self, tensor: Tensor, transfer: Transfer[Tensor], key: str) -> Tensor:
        parts = Reduction(tensor, self.rank, transfer.group)
        parts.put(self._combined(parts.packets, parts.combine, transfer, key))
        return tensor

    def begin(self, group: Group, work: Callable[[Transfer[T]], T]) -> Transfer[T]:
        """Starts work in a thread of its own."""
        transfer = Transfer[T](self, group)
        context = contextvars.copy_context()

        def run() -> None:
            try:
                transfer.finish(work(transfer))
            except Exception as error:
                transfer.fail(error)

        def ended(future: Future[Any]) -> None:
            if future.cancelled():
                transfer.fail(PeerLostError(transfer.others, "this peer has left the run"))

        try:
            self.peers.submit(lambda: context.run(run)).add_done_callback(ended)
        except RuntimeError:  # it has left already
            transfer.fail(PeerLostError(transfer.others, "this peer has left the run"))
        return transfer

    def wanted_by_others(self, listing: Listing) -> bool:
        """Whether somebody is still at a round of which this peer has packets."""
        at = self._rounds_of_others(listing)
        return any(round in at for _, _, round in self._kept)

    def _sweep(self, listing: Listing) -> None:
        """Has packets removed that nobody waits for any longer."""
        at, now = self._rounds_of_others(listing), self.now()
        here = (one.note for one in listing.written if one.note.kind == Kind.HERE)
        at |= {b"", *(note.subject for note in here if note.rank == self.rank)}
        over = [name for name, until, round in self._kept if now >= until or round not in at]
        self._kept = [kept for kept in self._kept if kept[0] not in over]
        self.peers.notes.leave(*over)

    def _rounds_of_others(self, listing: Listing) -> set[bytes]:
        """The rounds at which others still are."""
        there = (one.note for one in listing.written if one.note.kind == Kind.HERE and one.note.rank != self.rank)
        return {note.subject for note in there if self.peers.found(note.rank)}

    def _combined(self, packets: Packets, combine: Combine, transfer: Transfer[Any], key: str) -> Packets:
        half = self._deadline / 2  # the other half of the time is for the way back
        self._swap(packets, transfer, f"{key}, to be combined", half)
        received = {rank: transfer.delivered.pop(rank) for rank in sorted(transfer.delivered)}
        combined = combine(received)
        self._swap(dict.fromkeys(received, combined), transfer, f"{key}, combined", half, bundled=True)
        return transfer.all_with(combined)

    def _swap(
        self, packets: Packets, transfer: Transfer[Any], key: str, deadline_s: float, bundled: bool = False
    ) -> None:
        """Writes the packets, and reads the others': who fails in that is lost, the rest goes on.

        They may come `bundled` where each has the same for all.
        """
        subject = self.peers.notes.seals.subject("packet", key, transfer.group)
        contents = _contents(packets, transfer.group)
        bundles = Bundles(self.peers, subject, transfer.group if bundled else ())
        began = self.now()
        missing = {rank for rank in packets if rank not in transfer.lost}
        suspects = set[int]()  # a listing may miss what is just being replaced: who is gone is so in two of them
        try:
            own = self._write(contents, subject, len(packets))
            pause = self._pause(BUNDLING, began) if bundles.used and not bundles.bears else 0.0
            while missing:
                listing = self.peers.look(time.monotonic() - pause / 2)  # what another exchange has seen will do
                late = self.now() - began > LATE_SHARE * deadline_s
                gone = self._gone(missing, listing)
                silent = set(transfer.group) if late else gone | transfer.lost.keys()
                self._read_all(bundles, subject, listing, transfer, silent)
                missing -= transfer.delivered.keys() | transfer.lost.keys()
                self._keep(bundles.write(own, contents[0], missing))
                lost, suspects = suspects & gone & missing, gone
                transfer.lost |= dict.fromkeys(lost, "it has gone, or has left the round")
                missing -= lost
                if self.now() - began > deadline_s:
                    transfer.lost |= dict.fromkeys(missing, f"it did not deliver within {deadline_s:g} s")
                    break
                if missing:
                    pause = self._pause(PAUSE_OF_MANY if bundles.used else PAUSE_SHARE, began)
        except StoreAwayError as error:
            transfer.lost |= dict.fromkeys(missing, plain(str(error)))
        self._count(packets, transfer)

    def _pause(self, share: float, began: float) -> float:
        """Waits for a part of the time that has passed; how long it was."""
        pause = min(max(FIRST_PAUSE, share * (self.now() - began)), LONGEST_PAUSE)
        time.sleep(pause)
        return pause

    def _gone(self, missing: set[int], listing: Listing) -> set[int]:
        """Those of some who will write no packet any more: who is at a round says so until it has all."""
        round = ROUND.get()
        at = self.peers.of(listing.written, Kind.HERE, round)
        return {rank for rank in missing if self.peers.found(rank) is None or (round and rank not in at)}

    def _write(self, contents: list[memoryview], subject: bytes, receivers: int) -> Written:
        """Writes one object: a part for each receiver, in the group's order, or one for all. Raises StoreAwayError."""
        said, count = self.peers.said, len(contents)
        own = self.peers.notes.post(Kind.PACKET, lambda **who: said(**who, subject=subject, count=count), contents)
        self._keep([own])
        self.traffic.packets_sent += receivers
        return own

    def _keep(self, written: list[Written]) -> None:
        """Has objects removed when nobody wants them any longer."""
        self._kept += [(one.name, self.now() + self._deadline, ROUND.get()) for one in written]

    def _read_all(
        self, bundles: Bundles, subject: bytes, listing: Listing, transfer: Transfer[Any], silent: set[int]
    ) -> None:
        """Reads what has come: bundles, and the packets of whom no bundle is still to come; some objects at a time."""
        known = {self.rank, *transfer.delivered, *transfer.lost}
        there = {
            rank: packet
            for rank, packet in self.peers.of(listing.written, Kind.PACKET, subject).items()
            if rank in transfer.group and rank not in known
        }
        for found in self.peers.readers.map(lambda one: bundles.packets(one, there), bundles.come(listing)):
            for rank, told in found.items():
                self._deliver(rank, told, transfer)
        alone = [one for rank, one in there.items() if rank not in transfer.delivered and bundles.alone(one, silent)]
        for _ in self.peers.readers.map(lambda one: self._read(one, bundles, transfer), alone):
            pass

    def _read(self, written: Written, bundles: Bundles, transfer: Transfer[Any]) -> None:
        note = written.note
        member = self.peers.members.by_rank[note.rank]
        if note.size > self.largest + OVERHEAD * (note.count + 1):
            self.peers.guard.strike(member.peer, "bad packet", f"{member.described}: its packet is too large")
            transfer.lost[note.rank] = "its packet is too large"
            return
        receivers = [rank for rank in transfer.group if rank != note.rank]
        try:
            self._deliver(note.rank, bundles.packet(written, receivers.index(self.rank)), transfer)
        except (SealError, FileNotFoundError, StoreAwayError) as error:
            transfer.lost[note.rank] = plain(str(error))

    def _deliver(self, rank: int, told: memoryview, transfer: Transfer[Any]) -> None:
        nothing = torch.empty(0, dtype=torch.uint8)  # of which torch makes no buffer
        transfer.delivered[rank] = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else nothing
        self.traffic.packets_received += 1

    def _count(self, packets: Packets, transfer: Transfer[Any]) -> None:
        """Notes who has delivered, and who has not though it is there."""
        for rank in packets:
            if member := self.peers.members.by_rank.get(rank):
                (self.peers.guard.missed if rank in transfer.lost else self.peers.guard.delivered)(member.peer)


def _contents(packets: Packets, group: Group) -> list[memoryview]:
    """A part for each receiver, in the group's order, or one for all."""
    parts = [packets[rank] for rank in group if rank in packets]
    if all(part is parts[0] for part in parts):
        parts = parts[:1]
    return [part.detach().cpu().contiguous().numpy().data.cast("B") for part in parts]
