"""This peer among the others in a folder: it says that it is there, and hears who else is."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from farflung.durations import duration
from farflung.errors import UserError
from farflung.formats import PROTOCOL
from farflung.networks.base import Traffic
from farflung.networks.folder.clocks import Clocks
from farflung.networks.folder.notes import Listing, Notes, Written
from farflung.networks.folder.sealing import Kind, Note, SealError, Seals
from farflung.networks.folder.store import Store, StoreAwayError
from farflung.networks.folder.sweeping import Sweeper
from farflung.networks.peers.admission import disagreement
from farflung.networks.peers.frames import Frame, FrameError, parsed, plain
from farflung.networks.peers.guard import Guard
from farflung.networks.peers.identity import Identity
from farflung.networks.peers.member import (
    ALIVE_SECONDS,
    BEAT_SECONDS,
    CLOCK_SECONDS,
    FASTEST,
    FRESH_SECONDS,
    FURTHEST,
    Member,
    member_in,
    signed,
)
from farflung.networks.peers.members import Members
from farflung.networks.peers.ticket import Ticket

STALE_SECONDS = 3600.0
"""What is older, and was written by who is not there any more, is removed by whoever has seen it for a while."""
CLOSED_SECONDS = 600.0
"""How long it is kept who met in a round whose members did not find each other by themselves; and what is stale, by who
sees it, whose own clock may be wrong."""
ABSENT_SECONDS = 1.0
"""How long nothing is there of one that has left: a listing may miss what is just being replaced."""
AT_A_TIME = 64
"""Threads that wait for others."""
READERS = 8
"""Objects that are read at a time."""
STAYING = (Kind.STATE, Kind.PIECE)
"""Objects that may be wanted when their writer has gone, and do not say that it is there."""
LARGEST_CARD = 1 << 14
MOST_FAULTS = 16
MOST_CHECKED = 60000
"""Notes of which a peer remembers whether their signatures hold."""


class Presence:
    """A member of the run in a ticket's folder; `tell` is told in one line what its user should know.

    Each beat's content is the peer's card, a signed record of what it says of itself. A peer that is not `listed` only
    reads. A store that fails is tried again for `patience_s` seconds, and with the next beat.
    """

    def __init__(
        self,
        ticket: Ticket,
        identity: Identity,
        info: Frame,
        tell: Callable[[str], None],
        patience_s: float,
        listed: bool = True,
    ) -> None:
        self.ticket = ticket
        self.identity = identity
        self.tell = tell
        self.guard = Guard(tell)
        self.fault: UserError | None = None
        """Why this peer cannot stay in the run."""
        self.away: str = ""
        """Why the folder cannot be reached now."""
        session = os.urandom(4)
        self.info: Frame = {**_just_come(), "session": session.hex(), "listed": listed, **info}
        self.members = Members(self.info, self.guard)
        self.traffic = Traffic()
        store = Store(f"{ticket.folder}/{ticket.run}", patience_s, self.traffic)
        seals = Seals(ticket.secret, identity)
        self.notes = Notes(store, seals, identity.rank, int.from_bytes(session), self.guard)
        self.pool, self.readers = ThreadPoolExecutor(AT_A_TIME, "folder"), ThreadPoolExecutor(READERS, "reading")
        self.sweeper = Sweeper(self.notes, self.tell_once)
        self.tidying: list[Callable[[Listing], None]] = []
        """What else is to be done with a listing now and then."""
        self._hearing = threading.Lock()
        self._clocks: Clocks | None = Clocks(identity.rank)
        """Until they have found that this peer's clock is off."""
        self._cards: dict[tuple[int, int], tuple[Member, float]] = {}
        """What those who are there say of themselves, by rank and session, and when it was read."""
        self._heard: dict[int, int] = {}
        """The number of each member's newest note."""
        self._began = float("inf")  # when it had looked for the first time
        self._absent: dict[int, float] = {}
        """Of whom nothing is there, and since when."""
        self._checked: dict[str, bool] = {}
        self._refused: set[tuple[int, int]] = set()
        self._beat: Written | None = None
        self._told: set[str] = set()
        self._over, self._news = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="folder", daemon=True)

    def start(self) -> None:
        """Takes its place. Raises UserError."""
        try:
            self.notes.store.begin()
            self.look(time.monotonic())
            self._began = time.monotonic()
            self.check()
            if self.info["listed"]:
                self.beat()
        except StoreAwayError as error:
            raise UserError(f"{error}; see that this machine reaches it, and may write there") from error
        self._thread.start()

    def close(self, stays: Callable[[Written], bool] = lambda written: False) -> None:
        """Leaves, and takes along what it has written, but what stays; the last one, what others have left behind."""
        self._over.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self.sweeper.close()
        for pool in (self.pool, self.readers):
            pool.shutdown(wait=False, cancel_futures=True)
        try:
            if self.info["listed"]:
                self.notes.staying.clear()  # by now this peer may be allowed to
                self._remove(lambda one: self._is_own(one.note) and not stays(one), self.notes.own_fixed)
                listing = self.look(time.monotonic())
                if not (self.fault or self._others(listing)):  # with a fault, there is somebody whom it disturbs
                    self._remove(lambda one: not stays(one), listing.fixed)
        except StoreAwayError as error:
            self.tell(f"{error}; what this peer has written there is removed by the others in time")

    def _others(self, listing: Listing) -> bool:
        """Whether anybody else is there: who is heard, or writes though it was never heard, as with another clock."""
        for one in listing.written:
            rank = one.note.rank
            if rank == self.identity.rank or one.note.kind in STAYING:
                continue
            if self.found(rank) or (rank not in self.members.by_rank and one.seen > self._began):
                return True
        return False

    def _remove(self, which: Callable[[Written], bool], fixed: Iterable[str]) -> None:
        """Removes objects now. Raises StoreAwayError."""
        there = self.look(time.monotonic()).written
        self.notes.leave(*(one.name for one in there if which(one)), *fixed)
        self.sweeper.sweep()

    def check(self) -> None:
        """Raises UserError when this peer cannot stay in the run."""
        if self.fault:
            raise self.fault

    def said(self, **about: Any) -> Note:
        """A note, with this peer's step and rate."""
        return Note(step=self.info["step"], rate=self.info["rate"], trains=bool(self.info["trains"]), **about)

    def beat(self) -> None:
        """Says that this peer is there, in place of the last time. Raises StoreAwayError."""
        card = json.dumps(signed(self.identity, self.info)).encode()
        last, self._beat = self._beat, self.notes.post(Kind.BEAT, self.said, [card])
        if last:
            self.notes.leave(last.name)

    def beat_soon(self) -> None:
        """Has its thread say now what is new, on which others wait."""
        self._news.set()

    def look(self, newer_than: float) -> Listing:
        """What is there, of which members are heard. Raises StoreAwayError."""
        listing = self.notes.look(newer_than)
        with self._hearing:
            self._hear(listing.written)
            if self._clocks and (fault := self._clocks.fault(listing)):
                self._clocks = None
                self.tell(fault)
        return listing

    def of(self, written: Iterable[Written], kind: Kind, subject: bytes | None = None) -> dict[int, Written]:
        """The newest object of a kind, and about a subject, of each other member that is there, by its rank."""
        newest: dict[int, Written] = {}
        for one in written:
            note = one.note
            if note.kind != kind or note.rank == self.identity.rank or subject not in (None, note.subject):
                continue
            card = self._cards.get((note.rank, note.session))
            is_newer = note.rank not in newest or newest[note.rank].note.number < note.number
            if card and is_newer and self._is_theirs(card[0], one) and self._is_current(note):
                newest[note.rank] = one
        return newest

    def card_of(self, note: Note) -> Member:
        """What the writer of a note that `of` has found says of itself."""
        return self._cards[note.rank, note.session][0]

    def found(self, rank: int) -> Member | None:
        """The member with a rank, if it is there."""
        member = self.members.by_rank.get(rank)
        return member if member and member.alive else None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Does work in a thread of its own."""
        return self.pool.submit(work)

    def tell_once(self, fault: str) -> None:
        """Tells of a fault, unless it was told before."""
        fault = plain(fault)
        if fault not in self._told and len(self._told) < MOST_FAULTS:
            self._told.add(fault)
            self.tell(fault)

    def _go_on(self) -> None:
        """Beats, hears and tidies up, until this peer leaves."""
        since = None
        while True:
            self._news.wait(BEAT_SECONDS)
            self._news.clear()
            if self._over.is_set():
                return
            try:
                if self.info["listed"]:
                    self.beat()
                listing = self.look(time.monotonic() - BEAT_SECONDS)  # who has just looked need not look again
                self.sweeper.soon(partial(self._tidy, listing))
                if since is not None:
                    self.tell(f"the folder is there again, after {duration(time.monotonic() - since)}")
                since, self.away = None, ""
            except StoreAwayError as error:
                if since is None:
                    since = time.monotonic()
                    self.tell(f"{plain(str(error))}; this peer trains on alone, and asks again")
                self.away = str(error)
            except Exception as error:  # no work dies unheard
                self.tell_once(f"a part of this peer's work has failed: {error!r}")

    def _tidy(self, listing: Listing) -> None:
        """Removes what is no longer needed: its own, and in time that of those who have gone. Raises StoreAwayError."""
        if not self.info["listed"]:
            return
        now, seen_before = time.time(), time.monotonic() - CLOSED_SECONDS
        for one in listing.written:
            note = one.note
            if note.kind in STAYING:
                continue
            stale = one.seen < seen_before and now - note.time > STALE_SECONDS
            old = stale and not self._is_current(note)
            before = note.rank == self.identity.rank and note.session != self.notes.session
            if old or (before and one.seen < time.monotonic() - ALIVE_SECONDS):  # else its writer may go on
                self.notes.leave(one.name)
        self.notes.leave(*self.notes.fixed_since(seen_before))
        for tidy in self.tidying:
            tidy(listing)
        self.sweeper.sweep()

    def _hear(self, written: Iterable[Written]) -> None:
        """Takes the newest of what each member says."""
        of_each: dict[tuple[int, int], list[Written]] = {}
        for one in written:
            if one.note.kind not in STAYING and time.time() - one.note.time < FRESH_SECONDS:
                of_each.setdefault((one.note.rank, one.note.session), []).append(one)
        for (rank, session), theirs in of_each.items():
            if rank == self.identity.rank:
                self._meet_oneself(session, theirs)
            elif (member := self._card(rank, session, theirs)) is not None:
                self._heard_of(member, session, [one for one in theirs if self._is_theirs(member, one)])
        there, now = {rank for rank, _ in of_each}, time.monotonic()
        absent = [member.rank for member in self.members.all() if member.alive and member.rank not in there]
        self._absent = {rank: self._absent.get(rank, now) for rank in absent}
        for rank, since in self._absent.items():
            if now - since > ABSENT_SECONDS:  # who leaves removes what it has written
                self.members.failed(rank)

    def _heard_of(self, card: Member, session: int, theirs: list[Written]) -> None:
        newest = max((one.note for one in theirs), key=lambda note: note.number, default=None)
        known = self.members.by_rank.get(card.rank)
        if newest is None or (known and known.session == card.session and newest.number <= self._heard[card.rank]):
            return
        if known and known.session != card.session and known.began > card.began:
            return  # an older process's last words
        to_come = newest.time - time.time() > 2 * CLOCK_SECONDS
        if to_come or not 0 <= newest.rate <= FASTEST or newest.step > FURTHEST:
            self.guard.strike(card.peer, "bad record", f"{card.described}: its step, speed or clock cannot be")
            return
        age = max(0.0, time.time() - newest.time - 2 * CLOCK_SECONDS)
        about = {**vars(card), "step": newest.step, "rate": newest.rate, "trains": newest.trains}
        news = Member(**about | {"signed_at": newest.time, "heard": time.monotonic() - age, "moved": time.monotonic()})
        self._heard[card.rank] = newest.number
        self.members.hear(news, first_hand=True)

    def _card(self, rank: int, session: int, theirs: list[Written]) -> Member | None:
        """What a member says of itself, read anew now and then; None for one that has no part in the run."""
        known = self._cards.get((rank, session))
        beats = [one for one in theirs if one.note.kind == Kind.BEAT]
        if (rank, session) in self._refused or not (beats or known):
            return None
        if known and (not beats or time.monotonic() - known[1] < BEAT_SECONDS * (1 + len(self._cards))):
            return known[0]
        newest = max(beats, key=lambda one: one.note.number)
        try:
            member = self._read_card(newest)
        except FileNotFoundError:  # it has just been replaced
            return known[0] if known else None
        except (FrameError, SealError) as error:
            if isinstance(error, FrameError):
                self.guard.refuse("bad card")
            return known[0] if known else None
        if why := disagreement(member.record["about"], self.info):
            self._refused.add((rank, session))
            self._disagree(member, why)
            return None
        self._cards[rank, session] = member, time.monotonic()
        return member

    def _read_card(self, beat: Written) -> Member:
        """What the writer of a beat says of itself. Raises FrameError, SealError and FileNotFoundError."""
        if beat.note.size > LARGEST_CARD:
            raise FrameError("a card is too large")
        content = self.notes.store.get(beat.name, 0, beat.note.size)
        try:
            _, told = self.notes.seals.told(beat.name, 0, content)
        except SealError as error:
            self.guard.refuse(f"{error.kind} object")
            raise
        member = member_in(parsed(bytes(told)))
        if member.rank != beat.note.rank or int(member.session, 16) != beat.note.session:
            raise FrameError("a card is another peer's")
        self.notes.opened(member.peer, beat.name, 0, content)
        return member

    def _disagree(self, other: Member, why: str) -> None:
        """One of two that differ cannot take part: the one that has come later."""
        self.guard.refuse("other settings")
        if other.began < self.info["began"] and not self._thread.is_alive():
            self.fault = UserError(why)

    def _is_theirs(self, card: Member, one: Written) -> bool:
        """Whether a member has signed a note; each is checked but once."""
        if one.name not in self._checked:
            if len(self._checked) > MOST_CHECKED:
                self._checked.clear()
            self._checked[one.name] = self.notes.checked(card.peer, one)
        return self._checked[one.name]

    def _is_own(self, note: Note) -> bool:
        """Whether this peer has written a note, or its process before; another process may go on with the same key."""
        return note.rank == self.identity.rank and (not self.fault or note.session == self.notes.session)

    def _is_current(self, note: Note) -> bool:
        """Whether a note is of who is there now, and not of who was there before under the same key."""
        member = self.found(note.rank)
        return member is not None and int(member.session, 16) == note.session

    def _meet_oneself(self, session: int, theirs: list[Written]) -> None:
        """Leaves to another process what has the same key, if that goes on beside this one."""
        newest = max(one.note.time for one in theirs)
        if session == self.notes.session or newest < self.info["began"] + 2 * CLOCK_SECONDS:
            return  # it may be from before this one's start
        card = self._card(self.identity.rank, session, theirs)
        if card and card.began < self.info["began"]:
            self.fault = UserError(
                f"another process takes part with the same key ({card.host}); a copied run folder needs a key of its "
                "own: remove peer.key, or use another --out"
            )


def _just_come() -> Frame:
    """What a peer that has just come says of itself, besides its session."""
    start: Frame = {"protocol": PROTOCOL.version, "began": time.time(), "step": 0, "rate": 0.0}
    return {**start, "addresses": [], "facts": {}}
