"""The run's state in the folder: written for newcomers who ask, and now and then for the day when all have gone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import torch
from torch import Tensor

from farflung.networks.base import CORE_ONLY, PeerLostError, SharedState
from farflung.networks.folder.keeping import KeptStates
from farflung.networks.folder.meetings import turn
from farflung.networks.folder.notes import Listing, Written
from farflung.networks.folder.presence import STAYING, Presence
from farflung.networks.folder.sealing import OVERHEAD, SUBJECT, Kind, SealError
from farflung.networks.folder.store import StoreAwayError
from farflung.networks.peers.believing import Believed, Signs, Source, by_majority, by_spread, largest_group, signs_for
from farflung.networks.peers.frames import Frame, FrameError, digest, entry, parsed, reading
from farflung.networks.peers.identity import rank_of
from farflung.networks.peers.manifests import LONGEST, Manifest, described, manifest_of, pieces_of
from farflung.networks.peers.member import CLOCK_SECONDS, Member
from farflung.networks.peers.packing import longest, packed, unpack

GIVERS = 3
"""Peers that write their state for one who asks: of three, none is believed alone."""
KEPT_SECONDS = 1800.0
"""How long a state is kept that was asked for."""
ANSWER_SECONDS, GRACE_SECONDS = 120.0, 15.0
"""How long the first answer is waited for, and after it the others."""
LOOK_SECONDS = 1.0


class FolderStates:
    """Gives this peer's state and fetches others'. No state of more than `largest` bytes is taken.

    A peer that holds the core only takes and gives no more than that, and keeps nothing for when all have gone.
    """

    def __init__(self, presence: Presence, largest: int) -> None:
        self.largest = largest
        self._presence = presence
        self._notes = presence.notes
        self._answered: set[bytes] = set()
        self._given: dict[str, float] = {}
        """Own objects, and until when they are kept."""
        self._refused: set[int] = set()
        """Ranks, which tell of keys: who has written a state that was kept may have gone, or never have been seen."""
        self._writer = ThreadPoolExecutor(1, "states")
        """Which writes one state after the other: the last one stays."""
        self._writing: list[Future[None]] = []
        self.kept = KeptStates(presence)
        presence.tidying += [self._tidy, self.kept.tidy]

    @property
    def due(self) -> bool:
        """Whether this peer is to write its state."""
        return bool(self._asked(self._notes.last))

    def give(self, state: SharedState) -> None:
        """Writes a copy of the state, in a thread of its own."""
        wanted = self._asked(self._notes.last)
        self._answered |= wanted.keys()
        if self.kept.keeps:
            wanted |= {self.kept.whole: False} | ({self.kept.core: True} if state.beside else {})
        copies = [
            (*described(state, core), [subject for subject, only in wanted.items() if only is core])
            for core in set(wanted.values())
        ]

        def write() -> None:
            try:
                for copy in copies:
                    self._write(*copy)
            except StoreAwayError as error:
                self._presence.tell_once(f"the run's state was not written: {error}")

        self._writing = [one for one in self._writing if not one.done()] + [self._writer.submit(write)]

    def finish(self, seconds: float) -> None:
        """Waits at most so long for what is being written."""
        wait(self._writing, seconds)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def fetch(self, identical: bool) -> SharedState:
        """The state of those who train, or where nobody does, the last that was kept. Raises PeerLostError."""
        try:
            givers = self._presence.members.holding(self._presence.members.core_only)
            sources = self._answers(len(givers)) if givers else self._described(self._kept_ahead())
            return self._taken(sources, identical)
        except StoreAwayError as error:
            raise PeerLostError([], str(error)) from error

    def kept_step(self) -> int | None:
        """The step of the last state that was kept for when all have gone; None where there is none."""
        return max((one.note.step for one in self._kept()), default=None)

    def refuse(self, rank: int) -> None:
        """Takes no state of a peer any more."""
        self._refused.add(rank)

    def _asked(self, listing: Listing) -> dict[bytes, bool]:
        """Whose questions this peer is to answer, and which of them are for the core only."""
        asked, members, own = {}, self._presence.members, self._presence.identity.rank
        for ask in self._presence.of(listing.written, Kind.ASK).values():
            subject, core = ask.note.subject, CORE_ONLY in self._presence.card_of(ask.note).facts
            givers = [one.rank for one in members.holding(core)] + [own] * (core or not members.core_only)
            first = sorted(givers, key=lambda rank: turn(subject.hex(), rank))[:GIVERS]
            if subject not in self._answered and own in first:
                asked[subject] = core
        return asked

    def _write(self, content: Tensor, description: Frame, subjects: Iterable[bytes]) -> None:
        view, said = content.numpy().data, self._presence.said
        pieces = [view[piece] for piece in pieces_of([length for _, length in description["tensors"]])]
        for subject in subjects:
            names, at = [], {"subject": subject, "step": description["facts"]["step"]}
            for piece in pieces:
                post = self._notes.post(Kind.PIECE, lambda **who: replace(said(**who), **at), [packed(piece)])  # noqa: B023
                names.append(post.name)
            digests = [digest(piece) for piece in pieces]
            own = self._presence.identity.peer
            about = {"id": os.urandom(8).hex(), "digests": digests, "names": names, "peer": own}
            told = json.dumps({**about, **description}).encode()
            state = self._notes.post(Kind.STATE, lambda **who: replace(said(**who), **at), [told])  # noqa: B023
            until = time.monotonic() + KEPT_SECONDS
            if self.kept.has(state):
                self.kept.wrote(state, names)
            else:
                self._given |= dict.fromkeys([*names, state.name], until)

    def _answers(self, givers: int) -> list[tuple[Source, list[str]]]:
        """What peers say of their states, who are asked; of as many as answer, where so many can."""
        subject, said = os.urandom(SUBJECT), self._presence.said
        ask = self._notes.post(Kind.ASK, lambda **who: said(**who, subject=subject))
        expected = min(GIVERS, givers)
        began, first, found = time.monotonic(), None, dict[int, Written]()
        try:
            while len(found) < expected and time.monotonic() - began < ANSWER_SECONDS:
                if first and time.monotonic() - first > GRACE_SECONDS:
                    break
                listing = self._presence.look(time.monotonic())
                found = self._presence.of(listing.written, Kind.STATE, subject)
                first = first or (time.monotonic() if found else None)
                if len(found) < expected:
                    time.sleep(LOOK_SECONDS)
            return self._described(found.values())
        finally:
            self._notes.leave(ask.name)

    def _kept_ahead(self) -> list[Written]:
        """Those of use to this peer; while others train who have none to give, it goes back to no step before its own.

        Else it would do so in each round in which it finds itself behind them.
        """
        least = self._presence.info["step"] if self._presence.members.training() else -1
        return [one for one in self._kept() if one.note.step > least]

    def _kept(self) -> list[Written]:
        """What was kept, by whom this peer has not refused."""
        return [one for one in self.kept.newest() if one.note.rank not in self._refused]

    def _described(self, written: Iterable[Written]) -> list[tuple[Source, list[str]]]:
        """Whose states can be taken, the furthest first."""
        found = []
        for one in written:
            try:
                found.append(self._read_manifest(one))
            except (FrameError, SealError, FileNotFoundError):
                self._presence.guard.refuse("bad state")
        return sorted(found, key=lambda source: -source[0][1].step)

    @reading("a state's description")
    def _read_manifest(self, one: Written) -> tuple[Source, list[str]]:
        content = self._notes.store.get(one.name, 0, LONGEST + OVERHEAD)
        told = parsed(bytes(self._notes.seals.told(one.name, 0, content)[1]))
        peer = str(entry(told, "peer", str))
        if one.note.rank in self._refused or rank_of(peer) != one.note.rank or not self._notes.checked(peer, one):
            raise FrameError("its writer is not believed")
        self._notes.opened(peer, one.name, 0, content)
        manifest = manifest_of(told, self.largest, self._presence.members.furthest_step())
        names = [str(name) for name in entry(told, "names", list)]
        if len(names) != len(manifest.pieces) or manifest.step != one.note.step:
            raise FrameError("a state has other pieces than it says, or another step")
        return (_who(peer, one), manifest), names

    def _taken(self, described: list[tuple[Source, list[str]]], identical: bool) -> SharedState:
        """A state that can be believed. Raises PeerLostError."""
        sources = [source for source, _ in described]
        names = {source[0].peer: theirs for source, theirs in described}
        believed, contents = self._believed(sources, names, identical)
        for member in believed.false:
            if self._presence.found(member.rank):  # who has gone may have been right when it was there
                self._find_out(member, "bad state", "its state is not that of the others")
        for source in believed.sources:
            if content := contents.get(source[0].peer) or self._content(source, names[source[0].peer]):
                return _state_of(source, content)
        raise PeerLostError([source[0].rank for source in sources], "no peer has the run's state to give")

    def _believed(
        self, sources: list[Source], names: dict[str, list[str]], identical: bool
    ) -> tuple[Believed, dict[str, bytearray]]:
        """Whose states are believed, and the contents that were read for that."""
        if len(sources) < GIVERS:
            return Believed(sources), {}
        like = largest_group(sources, lambda manifest: manifest.tensors)
        if len(like) == 1:
            raise PeerLostError(
                [member.rank for (member, _) in sources], "no two peers say the same of the run's state"
            )
        if identical and (believed := by_majority(like)):
            return believed, {}
        read = {source[0].peer: self._content(source, names[source[0].peer]) for source in like}
        contents = {peer: content for peer, content in read.items() if content}
        there = [source for source in like if source[0].peer in contents]
        if not there:
            return Believed([]), contents
        pieces = there[0][1].pieces
        signs = signs_for(os.urandom(16).hex(), [piece.stop - piece.start for piece in pieces])
        sketches = [_sketched(memoryview(contents[member.peer]), manifest, signs) for member, manifest in there]
        return by_spread(there, sketches, signs), contents

    def _content(self, source: Source, names: list[str]) -> bytearray | None:
        """All pieces of a state; None where they are not there, or false, for which their writer is struck."""
        member, manifest = source
        content = bytearray(manifest.size)
        try:
            for number, (name, place) in enumerate(zip(names, manifest.pieces, strict=True)):
                into = memoryview(content)[place]
                sealed = self._notes.store.get(name, 0, longest(len(into)) + OVERHEAD)
                unpack(bytearray(self._notes.opened(member.peer, name, 0, sealed)), into)
                if fault := manifest.fault(number, into):
                    raise FrameError(fault)
        except FrameError as error:
            self._find_out(member, "bad piece", str(error))
        except (SealError, FileNotFoundError):
            self._presence.guard.refuse("bad piece")
        else:
            return content
        return None

    def _find_out(self, member: Member, kind: str, why: str) -> None:
        self.refuse(member.rank)
        self._presence.guard.strike(member.peer, kind, f"{member.described}: {why}")

    def _tidy(self, listing: Listing) -> None:
        """Has states removed that nobody wants any more: its own, and older ones of those who have gone."""
        now = time.monotonic()
        over = [name for name, until in self._given.items() if now >= until]
        for name in over:
            del self._given[name]
        self._notes.leave(*over)
        kept = (one.note.time for one in listing.written if self.kept.has(one))
        newest = max((moment for moment in kept if moment <= time.time() + CLOCK_SECONDS), default=0.0)
        for one in listing.written:
            note = one.note
            if note.kind not in STAYING or self._presence.found(note.rank):
                continue
            last = self.kept.has(one) and newest - note.time <= KEPT_SECONDS
            old = min(time.time() - note.time, now - one.seen) > KEPT_SECONDS  # clocks may be wrong
            if old and not last and note.rank != self._presence.identity.rank:
                self._notes.leave(one.name)


def _who(peer: str, one: Written) -> Member:
    """The writer of a state, who need not be there any more."""
    return Member(peer, one.note.rank, f"{one.note.session:08x}", "a peer", ())


def _state_of(source: Source, content: bytearray) -> SharedState:
    member, manifest = source
    values, tensors, at = torch.frombuffer(content, dtype=torch.float32), {}, 0
    for name, length in manifest.tensors:
        tensors[name] = values[at : at + length]
        at += length
    return SharedState(tensors, {"step": manifest.step, "history": manifest.history}, (member.rank,))


def _sketched(content: memoryview, manifest: Manifest, signs: Signs) -> Tensor:
    return torch.stack([signs.sketch(content[piece]) for piece in manifest.pieces])
