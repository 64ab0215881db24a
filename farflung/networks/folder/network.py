"""Replicas as peers that come and go, and meet in a folder: a share, a bucket, or a directory of an SSH server."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from farflung.networks.base import ElasticNetwork, Group, Network, Party, Pending, SharedState
from farflung.networks.folder.meetings import Meetings
from farflung.networks.folder.packets import BYTES_A_VALUE, LARGEST_MESSAGE, ROOM, ROUND, PacketExchanges
from farflung.networks.folder.presence import Presence
from farflung.networks.folder.states import FolderStates
from farflung.networks.folder.store import StoreAwayError
from farflung.networks.peers.admission import newcomer_info
from farflung.networks.peers.elastic import PeersNetwork
from farflung.networks.peers.environment import identity_from_env, ticket_from_env
from farflung.networks.peers.pace import Pace, Patience
from farflung.networks.peers.ticket import NobodyAnswersError, Ticket
from farflung.networks.transfer import IN_BACKGROUND, Transfer

T = TypeVar("T")

log = logging.getLogger(__name__)

LAST_SECONDS = 15.0
"""How long a peer that leaves lets others read what it has written for a round."""


class FolderNetwork(PeersNetwork, PacketExchanges):
    """A peer's seat in a run whose peers meet in a folder. Its rank is a number made of its key.

    Others are waited for at most `deadline` seconds. Where this is the first process of an island, `near` is the
    network of its processes. Raises UserError when the folder cannot be reached, or others do not want this peer.
    """

    peers: Presence

    def __init__(self, presence: Presence, deadline: float = 120.0, near: Network | None = None) -> None:
        super().__init__(presence, deadline)
        self.near = near
        self._meetings = Meetings(presence)
        self._states = FolderStates(presence, 4 * LARGEST_MESSAGE)
        self._prefetched: Pending[SharedState | None] | None = None
        self._pace = Pace()
        self._patience = Patience(deadline / 2)
        presence.start()

    def find_others(self) -> None:
        """Waits until another peer is there, or what all have left. Raises NobodyAnswersError."""
        ends = self.now() + self._deadline
        with contextlib.suppress(StoreAwayError):
            while self.behind(0) is None and not self.peers.members.proven():
                if self.now() > ends:
                    where = self.peers.notes.store.url
                    raise NobodyAnswersError(
                        f"nobody is in {where}, and there is nothing of the run; the run may be over"
                    )
                time.sleep(1.0)
                self.peers.look(time.monotonic())

    @classmethod
    def from_env(cls, deadline: float = 120.0) -> FolderNetwork:
        """Joins the run that FARFLUNG_TICKET leads to; this peer's key is in FARFLUNG_KEY, by default ./peer.key.

        Raises UserError.
        """
        ticket, identity = ticket_from_env(), identity_from_env()
        return cls(Presence(ticket, identity, newcomer_info(ticket), log.warning, min(30.0, deadline / 4)), deadline)

    @property
    def elastic(self) -> ElasticNetwork:
        """See Network."""
        return self

    def keep(self, cells: Sequence[str], here: Collection[str]) -> None:
        """Nothing: this process exchanges all cells."""

    def between(self, seats: Mapping[int, int]) -> Network:
        """See ElasticNetwork."""
        return self

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """See ElasticNetwork."""
        patience_s = self._patience.seconds(key)

        def meet(_: Transfer[T]) -> T:
            IN_BACKGROUND.set(True)
            visit, party = self._meetings.come(wanted, key, step, weight, lineage, patience_s)
            self._patience.ended(party, wanted)
            ROUND.set(visit.subject)
            try:
                return then(party)
            finally:
                self._meetings.leave(visit, bool(party.group))

        return self.begin(wanted, meet)

    def paced(self, step: int, every: int, rate: float = 0.0) -> int:
        """See ElasticNetwork: with the first step, a newcomer that comes before the next beat hears of it, too."""
        trained = self.peers.info["trains"]
        counted = super().paced(step, every, rate)
        if not trained:
            self.peers.beat_soon()
        return counted

    def stand_by(self, step: int) -> None:
        """Says that this peer is about to train on from a step: others then count on it in their first round."""
        self.peers.info.update(trains=True, step=step)
        with contextlib.suppress(StoreAwayError):
            self.peers.beat()

    @property
    def wanted(self) -> bool:
        """See ElasticNetwork."""
        return self._states.due

    @property
    def keeps(self) -> bool:
        """See ElasticNetwork: one of those who train keeps it in the folder."""
        return self._states.kept.keeps

    def give(self, state: SharedState) -> None:
        """See ElasticNetwork."""
        self._states.give(state)

    def expect_model(self, shapes: str, values: int) -> None:
        """Announces the model, by a hash of its shapes and its number of values, once it is known.

        Raises UserError when the run's peers have another.
        """
        self._announce(shapes)
        self.largest = BYTES_A_VALUE * values + ROOM
        self._states.largest = 4 * self.largest

    def behind(self, step: int) -> float | None:
        """How many steps the others are ahead of one, or were when they left; None where there is nothing of them."""
        median = self.peers.members.median_step()
        reached = self._states.kept_step() if median is None else median
        return None if reached is None else reached - step

    def prefetch(self, identical: bool) -> None:
        """Starts the download that the next `fetch` yields."""
        self._prefetched = self.fetch(identical)

    def fetch(self, identical: bool) -> Pending[SharedState | None]:
        """See ElasticNetwork."""
        begun, self._prefetched = self._prefetched, None
        self.peers.info["trains"] = False  # until its next step: nobody waits for it, or asks it for the state
        return begun or self.begin(self.members(), lambda _: self._states.fetch(identical))

    def accept(self) -> None:
        """Nothing: what was downloaded lies in memory."""

    def reject(self, state: SharedState, why: str) -> None:
        """See ElasticNetwork."""
        for rank in state.givers:
            self._states.refuse(rank)
            self.blame(rank, why)

    def invitation(self) -> Ticket:
        """The run's ticket."""
        return self.peers.ticket

    def close(self) -> None:
        """Leaves the run, when those that this peer has met have read what it has written."""
        self._states.finish(self._deadline)
        ends = self.now() + LAST_SECONDS
        with contextlib.suppress(StoreAwayError):
            while self.now() < ends and self.wanted_by_others(self.peers.look(time.monotonic())):
                time.sleep(0.5)
        self.peers.close(self._states.kept.stays)
