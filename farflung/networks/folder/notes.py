"""The objects that are there: what this peer has written, what others have, and what the folder's owner has done."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from farflung.networks.folder.sealing import (
    FIXED,
    OVERHEAD,
    Kind,
    Note,
    SealError,
    Seals,
    check_note,
    check_told,
)
from farflung.networks.folder.store import BESIDE, Store, StoreAwayError
from farflung.networks.peers.guard import Guard

REMEMBERED = 1 << 16
"""Names that have gone, to know them again."""
UNKNOWN = 4096
"""Names that nobody of the run has written, which are counted but once."""
AT_ONCE = 1 << 20
"""Bytes of an object that is read as a whole, though but a part of it is wanted."""
HEADER = 8
"""Bytes of a part's length, before the parts of a content that has several."""


@dataclass(frozen=True)
class Written:
    """An object of a member's: its name, and what that says."""

    name: str
    note: Note
    signature: bytes
    seen: float = float("inf")
    """When this peer has seen it first, on its monotonic clock: others' clocks may be anything."""


@dataclass
class Listing:
    """What was there, when a listing was asked for.

    In `fixed` are the names that tell nothing: those that all know beforehand, and those of what is not whole or counts
    for nothing, as what a server leaves that was stopped while it wrote.
    """

    at: float = float("-inf")
    written: list[Written] = field(default_factory=list)
    fixed: set[str] = field(default_factory=set)


class Notes:
    """Reads and writes a run's objects. May be used by many threads."""

    def __init__(self, store: Store, seals: Seals, rank: int, session: int, guard: Guard) -> None:
        self.store = store
        self.rank = rank
        self.session = session
        self.seals = seals
        self._guard = guard
        self._number = 0
        self._looking, self._writing = threading.Lock(), threading.Lock()
        self._last = Listing()
        self._known: dict[str, Written] = {}
        self._unknown: OrderedDict[str, None] = OrderedDict()
        self._mine: dict[str, float] = {}
        """Own objects, and since when they are there."""
        self._gone: OrderedDict[str, float] = OrderedDict()
        """Objects that are there no more, and since when."""
        self._fixed: dict[str, float] = {}
        self._leaving: dict[str, None] = {}
        """Objects that are to be removed."""
        self._removed: dict[str, float] = {}
        """Objects that the store says are removed, and since when; until a listing shows that they are."""
        self._again: set[str] = set()
        """Those of which one has shown that they are not."""
        self.missing: set[str] = set()
        """Own objects that somebody else has removed."""
        self.staying: set[str] = set()
        """Objects that may not be removed."""

    def post(
        self, kind: Kind, said: Callable[..., Note], parts: Sequence[bytes | memoryview] = (), sealed: bytes = b""
    ) -> Written:
        """Writes an object; `said` makes its note of what is given here. What is `sealed` already follows its parts.

        Raises StoreAwayError.
        """
        with self._writing:
            self._number += 1
            size = sum(map(len, parts)) + OVERHEAD * len(parts) + len(sealed)
            if len(parts) > 1:
                size += HEADER * len(parts) + OVERHEAD
            who: dict[str, Any] = {"kind": kind, "rank": self.rank, "session": self.session, "number": self._number}
            note = said(**who, time=time.time(), size=size)
        name = self.seals.name(note)
        try:
            self.store.put(name, self._sealed(name, parts) + sealed)
        except StoreAwayError:
            self.leave(name)  # it may have been written: others would wait for who has gone on alone
            raise
        self._mine[name] = time.monotonic()
        return Written(name, note, b"")

    def create(self, name: str, told: bytes) -> bool:
        """Writes an object with a name that others may want to write, too; whether this peer was the first."""
        created = self.store.create(name, self.seals.content(name, 0, told))
        if created:
            self._mine[name] = time.monotonic()
        return created

    def look(self, newer_than: float) -> Listing:
        """What is there; one listing is for all who ask meanwhile. Raises StoreAwayError."""
        with self._looking:
            if self._last.at < newer_than:
                began = time.monotonic()
                own = any(self._must_be_there(name, began) for name in list(self._mine))
                names = self.store.names(some=own)
                if not self._rolled_back(names, began):
                    self._check_removed(names, began)
                    self._take(names, began)
            return self._last

    @property
    def last(self) -> Listing:
        """What was there when somebody looked last."""
        return self._last

    def read(self, peer: str, written: Written, part: int | None = None) -> memoryview:
        """What a peer's object says; of one with several parts, one. Raises SealError, FileNotFoundError and kin."""
        name, count, size = written.name, written.note.count, written.note.size
        if part is None or count < 2:
            return self.opened(peer, name, 0, self.store.get(name, 0, size))
        table_bytes = HEADER * count + OVERHEAD
        whole = self.store.get(name, 0, size) if size <= AT_ONCE else None  # or in two requests
        table = self.opened(peer, name, 0, whole[:table_bytes] if whole else self.store.get(name, 0, table_bytes))
        sizes = [int.from_bytes(table[at : at + HEADER]) + OVERHEAD for at in range(0, len(table), HEADER)]
        begin, end = (table_bytes + sum(sizes[:count]) for count in (part, part + 1))
        if part >= len(sizes) or end > size:
            self._guard.refuse("truncated object")
            raise SealError("truncated")
        return self.opened(peer, name, part + 1, whole[begin:end] if whole else self.store.get(name, begin, end))

    def opened(self, peer: str, name: str, part: int, content: bytes | memoryview) -> memoryview:
        """What a part of an object says, if a peer has signed it; else counts why not. Raises SealError."""
        try:
            return self.unsealed(peer, name, part, content)
        except SealError as error:
            self._guard.refuse(f"{error.kind} object")
            raise

    def unsealed(self, peer: str, name: str, part: int, content: bytes | memoryview) -> memoryview:
        """What a part of an object says, if a peer has signed it. Raises SealError."""
        signature, told = self.seals.told(name, part, content)
        check_told(peer, name, part, signature, told)
        return told

    def checked(self, peer: str, written: Written) -> bool:
        """Whether a peer has signed a note; counts it if not."""
        try:
            check_note(peer, written.note, written.signature)
        except SealError as error:
            self._guard.refuse(f"{error.kind} object")
            return False
        return True

    def leave(self, *names: str) -> None:
        """Has objects removed with the next `sweep`, but those that may not be."""
        self._leaving.update(dict.fromkeys(name for name in names if name not in self.staying))

    def sweep(self) -> None:
        """Removes what is to be removed; counts what may not be. Raises StoreAwayError."""
        names = list(self._leaving)
        for name in names:
            self._mine.pop(name, None)
        staying = set(self.store.remove(names))
        now = time.monotonic()
        for name in names:
            self._leaving.pop(name, None)
            self.missing.discard(name)
            if name in staying:
                self._stays(name)
            else:
                self._removed[name] = now
                self._remember(name, now)

    @property
    def own_fixed(self) -> list[str]:
        """Own objects whose names tell nothing."""
        return [name for name in list(self._mine) if name.startswith(FIXED)]

    def fixed_since(self, moment: float) -> list[str]:
        """The names that tell nothing of objects that were seen before a moment."""
        return [name for name, since in self._fixed.items() if since < moment]

    def _stays(self, name: str) -> None:
        if name not in self.staying:
            self.staying.add(name)
            self._guard.refuse("object that may not be removed")

    def _check_removed(self, names: Collection[str], began: float) -> None:
        """Has what is still there removed once more: buckets say that all is well where they remove nothing."""
        for name, since in list(self._removed.items()):
            if since < began:
                del self._removed[name]
                if name not in names:
                    self._again.discard(name)
                    continue
                self._gone.pop(name, None)
                if name in self._again:
                    self._stays(name)
                self._again.add(name)
                self.leave(name)

    def _sealed(self, name: str, parts: Sequence[bytes | memoryview]) -> bytes:
        if len(parts) < 2:
            return b"".join(self.seals.content(name, 0, part) for part in parts)
        table = b"".join(len(part).to_bytes(HEADER) for part in parts)
        sealed = (self.seals.content(name, number, part) for number, part in enumerate([table, *parts]))
        return b"".join(sealed)

    def _rolled_back(self, names: dict[str, int], began: float) -> bool:
        """Whether a listing is an older one: with what has gone, and without what was written since."""
        missing = [name for name, since in list(self._mine.items()) if since < began and name not in names]
        back = [name for name in names if self._gone.get(name, began) < began]
        if missing and back:
            self._guard.refuse("rolled-back listing")
            return True
        for name in missing:
            if name not in self.missing and name not in self._leaving:
                self._guard.refuse("deleted object")
                self.missing.add(name)
        return False

    def _must_be_there(self, name: str, moment: float) -> bool:
        """Whether an own object is in each listing that is asked for after a moment."""
        since = self._mine.get(name, moment)
        return since < moment and name not in self._leaving and name not in self.missing

    def _take(self, names: dict[str, int], began: float) -> None:
        written, fixed = list[Written](), set[str]()
        for name, size in names.items():
            if name.startswith((FIXED, BESIDE)):
                fixed.add(name)
            elif (one := self._known_as(name, size, began)) is not None:
                written.append(one)
            else:
                fixed.add(name)
        for name in self._known.keys() - names.keys():
            del self._known[name]
            self._remember(name, began)
        self._fixed = {name: self._fixed.get(name, began) for name in fixed}
        self._last = Listing(began, written, fixed)

    def _known_as(self, name: str, size: int, began: float) -> Written | None:
        """What a name says, unless it is one that counts for nothing."""
        if name in self._known:
            return self._known[name]
        if name in self._unknown:
            return None
        kind = "replayed" if name in self._gone else ""
        if not kind:
            try:
                note, signature = self.seals.note(name)
                kind = "truncated" if size != note.size else ""
            except SealError as error:
                kind = error.kind
        if kind:
            self._guard.refuse(f"{kind} object")
            self._unknown[name] = None
            while len(self._unknown) > UNKNOWN:
                self._unknown.popitem(last=False)
            return None
        self._known[name] = Written(name, note, signature, began)
        return self._known[name]

    def _remember(self, name: str, since: float) -> None:
        self._gone[name] = since
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
