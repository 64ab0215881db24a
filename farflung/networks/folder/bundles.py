"""One object of many packets: among many, each reads a few objects, and not one of every other.

A group is cut into circles. One of each, its bearer, reads the circle's packets and writes them as one object, as their
writers have sealed them: it need not be believed. Where its bundle does not come, the packets themselves are read.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping

from farflung.networks.base import Group
from farflung.networks.folder.meetings import turn
from farflung.networks.folder.notes import Listing, Written
from farflung.networks.folder.presence import Presence
from farflung.networks.folder.sealing import OVERHEAD, Kind, SealError
from farflung.networks.folder.store import StoreAwayError
from farflung.networks.peers.circles import CIRCLE, SMALL, circles
from farflung.networks.peers.frames import FrameError, plain, reading

LARGEST = CIRCLE * (SMALL + 1024)
_ENTRY = struct.Struct(">QQ")
"""In a bundle's table: the rank of a packet's writer, and the sealed packet's bytes."""


@reading("a bundle")
def unbundled(table: memoryview, sealed: memoryview) -> dict[int, memoryview]:
    """The sealed packets of a bundle, by their writers' ranks. Raises FrameError."""
    found = {}
    for rank, size in _ENTRY.iter_unpack(table):
        found[rank], sealed = sealed[:size], sealed[size:]
    return found


class Bundles:
    """Of one exchange of a group in which each has one packet for all, about a subject."""

    def __init__(self, presence: Presence, subject: bytes, group: Group) -> None:
        self._presence = presence
        self._notes = presence.notes
        self._subject = subject
        self._own = presence.identity.rank
        self._bearers: dict[int, int] = {}
        for circle in circles(group):
            bearer = min(circle, key=lambda rank: turn(subject.hex(), rank))
            self._bearers |= dict.fromkeys(circle, bearer)
        self._read: set[int] = set()
        """The bearers whose bundles have been read."""
        self._sealed: dict[int, bytes] = {}
        """What this peer is to write, as its bearer."""
        self.used = bool(self._bearers)
        """Whether there are any."""
        self.bears = self._own in self._bearers.values()
        """Whether this peer writes one; else it reads nothing before others have."""

    def come(self, listing: Listing) -> list[Written]:
        """The bundles that are there, and were not read yet."""
        there = self._presence.of(listing.written, Kind.BUNDLE, self._subject)
        new = set(self._bearers.values()) & there.keys() - self._read
        self._read |= new
        return [there[rank] for rank in new]

    def alone(self, packet: Written, silent: Collection[int]) -> bool:
        """Whether a packet is to be read by itself: no bundle of it is still to come, as some bundle nothing."""
        bearer = self._bearers.get(packet.note.rank, self._own)
        return bearer in (self._own, *self._read, *silent) or packet.note.size > SMALL + OVERHEAD

    def packet(self, written: Written, part: int) -> memoryview:
        """What another one's packet says, read by itself. Raises SealError, FileNotFoundError and StoreAwayError."""
        rank, peer = written.note.rank, self._presence.card_of(written.note).peer
        if not self.bears or self._bearers[rank] != self._own or written.note.size > SMALL + OVERHEAD:
            return self._notes.read(peer, written, part)
        sealed = self._notes.store.get(written.name, 0, written.note.size)
        told = self._notes.opened(peer, written.name, 0, sealed)
        self._sealed[rank] = sealed
        return told

    def packets(self, bundle: Written, there: Mapping[int, Written]) -> dict[int, memoryview]:
        """What some packets say that are `there`, of those in a bundle that its bearer was to bundle."""
        bearer = self._presence.members.by_rank[bundle.note.rank]
        if bundle.note.size > LARGEST:
            self._presence.guard.strike(bearer.peer, "bad bundle", f"{bearer.described}: its bundle is too large")
            return {}
        found = {}
        try:
            for rank, sealed in self._sealed_in(bundle).items():
                if rank in there and self._bearers[rank] == bearer.rank:
                    packet = there[rank]
                    found[rank] = self._notes.unsealed(self._presence.card_of(packet.note).peer, packet.name, 0, sealed)
        except (FrameError, SealError) as error:
            self._presence.guard.strike(bearer.peer, "bad bundle", f"{bearer.described}: {plain(str(error))}")
        except (FileNotFoundError, StoreAwayError):
            pass  # the packets are read by themselves
        return found

    def write(self, own: Written, told: memoryview, missing: Collection[int]) -> list[Written]:
        """Writes the bundle, once none of the circle is missing. Raises StoreAwayError."""
        circle = {rank for rank, bearer in self._bearers.items() if bearer == self._own}
        if not self._sealed or circle & set(missing):
            return []
        if len(told) <= SMALL:
            self._sealed[self._own] = self._notes.seals.content(own.name, 0, told)
        packets, self._sealed = sorted(self._sealed.items()), {}
        table = b"".join(_ENTRY.pack(rank, len(sealed)) for rank, sealed in packets)
        said, about = self._presence.said, {"subject": self._subject, "count": len(packets)}
        sealed = b"".join(sealed for _, sealed in packets)
        return [self._notes.post(Kind.BUNDLE, lambda **who: said(**who, **about), [table], sealed)]

    def _sealed_in(self, bundle: Written) -> dict[int, memoryview]:
        """The packets in a bundle, by their writers' ranks. Raises FrameError, SealError and what `get` does."""
        content = memoryview(self._notes.store.get(bundle.name, 0, bundle.note.size))
        begin = OVERHEAD + _ENTRY.size * bundle.note.count
        table = self._notes.opened(self._presence.card_of(bundle.note).peer, bundle.name, 0, content[:begin])
        return unbundled(table, content[begin:])
