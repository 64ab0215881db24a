"""Who takes part in a round: it follows from who has come, so that nobody need be asked.

Who comes writes a note of the group that it wants. Where all of a group have come and want the same, they are the
round's members. Who waits in vain says so; those that are idle are grouped by the first of them, in an object that only
one can write.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from farflung.networks.base import BESIDE, Group, Party
from farflung.networks.folder.notes import Written
from farflung.networks.folder.presence import Presence
from farflung.networks.folder.sealing import Kind, SealError
from farflung.networks.folder.store import StoreAwayError
from farflung.networks.peers.circles import FEW
from farflung.networks.peers.frames import FrameError, number, parsed, reading, whole
from farflung.networks.peers.member import LAST_RANK
from farflung.networks.peers.weights import believed, with_common_anchors

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two looks, at first and at most."""
SLOWER, SLOWER_AMONG_MANY = 1.5, 2.0
"""Each pause is so many times as long as the last; of many, the last one comes later."""
GRACE_SECONDS = 4.0
"""How long one whose patience is over waits on for most of the others, and for who should group the idle."""
SEEN = 4
"""Requests until each of two has seen what the other says: both write it, and a listing may have begun just before."""
LARGEST_CLOSING = 1 << 18


@dataclass(frozen=True)
class Guest:
    """One that has come to a round."""

    rank: int
    wants: bytes
    """A hash of the group that it wants, of so many."""
    count: int
    idle: bool
    weight: float
    lineage: bytes

    @property
    def open(self) -> bool:
        """Whether it takes whoever comes."""
        return self.count > 2


def direct(own: int, guests: Mapping[int, Guest], taken: Collection[int]) -> Group:
    """The group that has come as it is wanted; empty where somebody is missing or wants another."""
    wanted = guests[own]
    alike = sorted(one.rank for one in guests.values() if one.wants == wanted.wants and one.rank not in taken)
    return tuple(alike) if len(alike) == wanted.count > 1 else ()


def grouped(guests: Mapping[int, Guest], taken: Collection[int], patient: bool) -> list[Group]:
    """The groups of those who have waited in vain: two and two, and all who take whoever comes.

    These wait for most of them, unless the one who asks is `patient` no longer.
    """
    free = [one for rank, one in sorted(guests.items()) if rank not in taken]
    pairs = [one.rank for one in free if one.idle and not one.open]
    found = [tuple(pairs[at : at + 2]) for at in range(0, len(pairs) - 1, 2)]
    circle = [one for one in free if one.open]
    idle = sum(one.idle for one in circle)
    if len(circle) > 1 and idle and (2 * idle > len(circle) or not patient):
        found.append(tuple(one.rank for one in circle))
    return found


def party_of(group: Group, guests: Mapping[int, Guest], own: int, key: str) -> Party:
    """Those of a group with the most common anchors; the others are behind. All members find the same."""
    weights = believed(with_common_anchors((rank, guests[rank].lineage, guests[rank].weight) for rank in group))
    witness = min(group, key=lambda rank: turn(key, rank))
    if own not in weights:
        return Party((), {}, behind=True, host=witness)
    return Party(tuple(sorted(weights)), weights, host=witness)


def turn(what: str, rank: int) -> bytes:
    """The less it is, the sooner it is a peer's turn."""
    return hashlib.sha256(f"{what} {rank}".encode()).digest()


@dataclass
class Visit:
    """This peer at a round."""

    key: str
    subject: bytes
    wanted: Group
    step: int
    guest: Guest
    note: Written | None = None
    until: float = 0.0
    """When its patience is over: then it takes others than it wants."""
    over: float = 0.0
    """When it has seen who came before that, and has been seen."""
    closed: dict[Group, Mapping[int, Guest]] = field(default_factory=dict)
    """The groups that others have made, and what these were of."""
    closings: int = 0
    others: int = 0
    """How many others have come."""


class Meetings:
    """Finds this peer's group in each round; its methods wait, each in a thread of its own."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._notes = presence.notes
        self._own = presence.identity.rank

    def come(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, patience_s: float
    ) -> tuple[Visit, Party]:
        """The group of those who come to a round. Never fails: at worst this peer stays alone; `leave` ends it."""
        seals = self._notes.seals
        wants = seals.word("wants", wanted)
        guest = Guest(self._own, wants, len(wanted), False, weight, seals.word("lineage", lineage))
        visit = Visit(key, seals.subject("round", key), wanted, step, guest)
        if self._presence.away:
            return visit, Party((), {}, alone="away")
        try:
            self._say(visit)
            visit.until = time.monotonic() + patience_s  # since others can see it
            visit.over = visit.until + SEEN * self._notes.store.listing_s
            party = self._party(visit)
            if not (party.group or party.behind) and visit.note:  # at once: who came now would wait for it
                self._notes.leave(visit.note.name)
                self._presence.sweeper.soon()
            return visit, party
        except StoreAwayError as error:
            self._presence.away = str(error)
            return visit, Party((), {}, alone="away")

    def leave(self, visit: Visit, met: bool) -> None:
        """Takes this peer's note of a round away; soon if it has `met` others, who have seen it, else after a beat."""
        if visit.note:
            self._notes.leave(visit.note.name)
            if met:
                self._presence.sweeper.soon()

    def _say(self, visit: Visit) -> None:
        """Writes that this peer is there, in place of what it has written before."""
        guest, last = visit.guest, visit.note
        about: dict[str, Any] = {
            "subject": visit.subject,
            "weight": guest.weight,
            "lineage": guest.lineage,
            "wants": guest.wants,
        }
        about |= {"count": guest.count, "idle": guest.idle}
        said = self._presence.said
        visit.note = self._notes.post(
            Kind.HERE, lambda **who: replace(said(**who, **about), step=visit.step, trains=True)
        )
        if last:
            self._notes.leave(last.name)

    def _party(self, visit: Visit) -> Party:
        pause, slower = FIRST_PAUSE, SLOWER if len(visit.wanted) <= FEW else SLOWER_AMONG_MANY
        while True:
            listing = self._presence.look(time.monotonic())
            guests = self._guests(visit, listing.written)
            self._read_closings(visit, listing.fixed, guests)
            if party := self._placed(visit, guests):
                return party
            now = time.monotonic()
            if not visit.guest.idle and (now >= visit.until or not self._comes(visit, visit.wanted, guests)):
                visit.guest = guests[self._own] = replace(visit.guest, idle=True)
                if self._can_be_placed(visit, guests, now):  # else it leaves, and others shall not see it until then
                    self._say(visit)
            if visit.guest.idle:
                if now < visit.over + 2 * GRACE_SECONDS and self._close(visit, guests, now):
                    continue
                if not self._can_be_placed(visit, guests, now):
                    return Party((), {}, alone="left over" if visit.closings or visit.others else "nobody")
            time.sleep(max(FIRST_PAUSE, min(pause, visit.until - now)))
            pause = min(pause * slower, LONGEST_PAUSE)

    def _guests(self, visit: Visit, written: Iterable[Written]) -> dict[int, Guest]:
        """Those who have come, this peer among them."""
        found = {self._own: visit.guest}
        allowed = {member.rank for member in self._presence.members.in_good_standing()}
        for rank, one in self._presence.of(written, Kind.HERE, visit.subject).items():
            if rank in allowed:
                note = one.note
                found[rank] = Guest(rank, note.wants, note.count, note.idle, note.weight, note.lineage)
        visit.others = max(visit.others, len(found) - 1)
        return found

    def _placed(self, visit: Visit, guests: Mapping[int, Guest]) -> Party | None:
        """This peer's party, once it is in a group."""
        for group, as_told in visit.closed.items():
            if self._own in group:
                return party_of(group, as_told, self._own, visit.key)
        taken = {rank for group in visit.closed for rank in group}
        if group := direct(self._own, guests, taken):
            return party_of(group, guests, self._own, visit.key)
        return None

    def _comes(self, visit: Visit, ranks: Iterable[int], guests: Mapping[int, Guest]) -> bool:
        """Whether one of some who have not come can still do so while this peer waits."""
        left = visit.until - time.monotonic()
        members = self._presence.members.by_rank
        missing = (member for rank in ranks if rank not in guests and (member := members.get(rank)))
        there = [member for member in missing if member.alive]
        if BESIDE in visit.key:  # they train, even where no news of that has come yet
            return any(member.rank in visit.wanted and not member.stalled for member in there)
        return any(member.trains and member.arrives(visit.step, left) for member in there)

    def _can_be_placed(self, visit: Visit, guests: Mapping[int, Guest], now: float) -> bool:
        """Whether one that is idle may still find others."""
        taken = {rank for group in visit.closed for rank in group}
        mates = [one for one in guests.values() if one.rank not in {*taken, self._own} and one.open == visit.guest.open]
        if any(one.idle or one.open for one in mates) and now < visit.over + 2 * GRACE_SECONDS:
            return True  # one of them groups them
        expected = [member.rank for member in self._presence.members.training()]
        return now < visit.over and (bool(mates) or self._comes(visit, expected, guests))

    def _close(self, visit: Visit, guests: Mapping[int, Guest], now: float) -> bool:
        """Groups those who have waited in vain, where that is this peer's turn; whether there may be news."""
        taken = {rank for group in visit.closed for rank in group}
        patient = now < visit.over + GRACE_SECONDS
        groups = grouped(guests, taken, patient)
        if not groups:
            return False
        idle = [rank for group in groups for rank in group if guests[rank].idle]
        if patient and min(idle, key=lambda rank: turn(visit.key, rank)) != self._own:
            return False
        told = [[_told(guests[rank]) for rank in group] for group in groups]
        name = self._closing(visit)
        if self._notes.create(name, json.dumps({"by": self._own, "groups": told}).encode()):
            visit.closed |= {group: {rank: guests[rank] for rank in group} for group in groups}
            visit.closings += 1
        else:
            self._read_closings(visit, {name}, guests)  # a listing may show it later
        return True

    def _closing(self, visit: Visit) -> str:
        """The name of the next object that groups those who are idle."""
        return self._notes.seals.fixed("closing", visit.key, visit.closings)

    def _read_closings(self, visit: Visit, fixed: Collection[str], guests: Mapping[int, Guest]) -> None:
        """Takes what others have made of those who were idle."""
        while (name := self._closing(visit)) in fixed:
            visit.closings += 1
            try:
                visit.closed |= self._read_closing(name, guests)
            except (FrameError, SealError, FileNotFoundError):
                self._presence.guard.refuse("bad closing")

    @reading("a group of those who were idle")
    def _read_closing(self, name: str, guests: Mapping[int, Guest]) -> dict[Group, Mapping[int, Guest]]:
        """The groups in an object. What they say of those whom this peer sees must be what these say themselves."""
        content = self._notes.store.get(name, 0, LARGEST_CLOSING + 1)
        if len(content) > LARGEST_CLOSING:
            raise FrameError("it is too large")
        told = parsed(bytes(self._notes.seals.told(name, 0, content)[1]))
        by = whole(told.get("by"), LAST_RANK)
        member = self._presence.members.by_rank.get(by)
        peer = self._presence.identity.peer if by == self._own else member.peer if member else ""
        self._notes.opened(peer, name, 0, content)
        found: dict[Group, Mapping[int, Guest]] = {}
        for group in told["groups"]:
            as_told = {one.rank: one for one in map(_guest, group)}
            for rank, one in as_told.items():
                if rank in guests and (one.weight, one.lineage) != (guests[rank].weight, guests[rank].lineage):
                    raise FrameError("it says of a guest what that does not say")
            found[tuple(sorted(as_told))] = as_told
        twice = [rank for rank, times in Counter(rank for group in found for rank in group).items() if times > 1]
        if twice:
            raise FrameError("one is in two groups")
        return found


def _told(guest: Guest) -> list[object]:
    return [guest.rank, guest.wants.hex(), guest.count, guest.weight, guest.lineage.hex()]


def _guest(told: list[object]) -> Guest:
    """A guest as another one tells of it. Raises what any reading of nonsense does."""
    rank, wants, count, weight, lineage = told
    about = bytes.fromhex(str(wants)), whole(count, LAST_RANK), True, number(weight), bytes.fromhex(str(lineage))
    return Guest(whole(rank, LAST_RANK), *about)
