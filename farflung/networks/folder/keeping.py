"""What is kept of the run's state for when all have gone: by one of those who train, and once."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.networks.folder.notes import Listing, Written
from farflung.networks.folder.presence import STAYING, Presence
from farflung.networks.folder.sealing import Kind
from farflung.networks.peers.members import AHEAD

SHARED, SHARED_CORE = b"the last state", b"the core of the last state"


class KeptStates:
    """The states in the folder that are for when all have gone: of the `whole` model, and of its `core` alone.

    The first by rank of those who train all of the model keeps them. Once it has written one, it removes what others
    have left that is no further. One that keeps them no more removes its own, once there is one that is as far.
    """

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._own = presence.identity.rank
        self._last: dict[bytes, list[str]] = {}
        """Own objects of the last states, by their subjects."""
        self.whole, self.core = (presence.notes.seals.subject(name) for name in (SHARED, SHARED_CORE))

    def has(self, written: Written) -> bool:
        """Whether an object is of such a state."""
        return written.note.kind in STAYING and written.note.subject in (self.whole, self.core)

    def stays(self, written: Written) -> bool:
        """Whether an object is of such a state, and not of an older one of this peer."""
        own = self._last.get(written.note.subject) if written.note.rank == self._own else None
        return self.has(written) and (own is None or written.name in own)

    @property
    def keeps(self) -> bool:
        """Whether this is the one that keeps them."""
        return not self._presence.members.core_only and self._keeper == self._own

    def newest(self) -> list[Written]:
        """The descriptions of those that are of use to this peer, whoever has written them, and is there or not."""
        subject = self.core if self._presence.members.core_only else self.whole
        return [one for one in self._descriptions(self._presence.notes.last) if one.note.subject == subject]

    def wrote(self, state: Written, pieces: Sequence[str]) -> None:
        """Takes note of a state that this peer has just written, and has removed what it replaces."""
        step, subject = state.note.step, state.note.subject
        before = self._last.get(subject, ())
        self._last[subject] = [*pieces, state.name]
        others = (one for one in self._presence.notes.last.written if self.has(one) and one.note.subject == subject)
        left = (one for one in others if one.note.rank == self._own or not self._presence.found(one.note.rank))
        over = [one.name for one in left if (one.note.step, one.note.rank) <= (step, self._own)]
        self._presence.notes.leave(*before, *(set(over) - set(self._last[subject])))

    def tidy(self, listing: Listing) -> None:
        """Has own states removed, where somebody else keeps one that is as far, as far as that can be told."""
        keeper, furthest = self._keeper, self._presence.info["step"] + AHEAD
        for own in self._descriptions(listing):
            mine = own.name in self._last.get(own.note.subject, ())
            if mine and any(
                one.note.rank == keeper != self._own
                and one.note.subject == own.note.subject
                and own.note.step <= one.note.step <= furthest
                for one in self._descriptions(listing)
            ):
                self._presence.notes.leave(*self._last.pop(own.note.subject))

    @property
    def _keeper(self) -> int:
        """The rank of the one that keeps them; of this peer where nobody else can."""
        members = self._presence.members
        ranks = [member.rank for member in members.holding(core=False)]
        return min([*ranks, *([] if members.core_only else [self._own])], default=self._own)

    def _descriptions(self, listing: Listing) -> list[Written]:
        return [one for one in listing.written if one.note.kind == Kind.STATE and self.has(one)]
