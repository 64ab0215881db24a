"""Replicas as peers on the open internet, that come and go: gossip and libp2p streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from farflung.networks.base import ElasticNetwork, Group, Network, Party, Pending, SharedState
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.doors import (
    Doorkeeper,
    door_frame,
    doors_in,
    party_frame,
    party_key,
    seated,
    shared,
)
from farflung.networks.internet.examination import answer_probes
from farflung.networks.internet.exchanges import Exchanges
from farflung.networks.internet.matchmaker import Matchmaker
from farflung.networks.internet.states.fetching import Fetching
from farflung.networks.internet.states.snapshots import Snapshots
from farflung.networks.internet.transport import LARGEST_MESSAGE, PacketTransport, stall_of
from farflung.networks.peers.admission import newcomer_info
from farflung.networks.peers.elastic import PeersNetwork
from farflung.networks.peers.environment import identity_from_env, listen_from_env, ticket_from_env
from farflung.networks.peers.pace import Pace, Patience
from farflung.networks.peers.ticket import Ticket
from farflung.networks.transfer import IN_BACKGROUND

T = TypeVar("T")

LONGEST_FETCH_SECONDS = 24 * 3600.0
"""A download that stalls ends much earlier."""


class InternetNetwork(PeersNetwork, Exchanges):
    """A peer's seat in a run on the internet. Its rank is a number made of its key.

    No message of more than `largest` bytes is taken. Others are waited for at most `deadline` seconds. What has come of
    the others' state is kept in the folder `fetched`, if given, until it was taken. Where this is the first process of
    an island, `near` is the network of its processes; these have doors of their own, unless this is the `gateway`.

    Raises UserError when there is nobody to join, or they do not want this peer.
    """

    peers: Peers

    def __init__(
        self,
        peers: Peers,
        largest: int = LARGEST_MESSAGE,
        deadline: float = 120.0,
        fetched: Path | None = None,
        near: Network | None = None,
        gateway: bool = False,
    ) -> None:
        stall_s = stall_of(deadline)
        super().__init__(peers.identity.rank, peers, PacketTransport(peers, largest, stall_s), deadline, {})
        self.near = near
        self._beside = None if gateway else near
        self._matchmaker = Matchmaker(peers)
        self._patience = Patience(deadline / 2)
        self._doorkeeper = Doorkeeper(peers)
        answer_probes(peers)
        self._snapshots = Snapshots(peers, stall_s)
        self._states = Fetching(peers, 4 * self._transport.largest, stall_s, fetched)
        self._prefetched: Pending[SharedState] | None = None
        self._pace = Pace()
        peers.start(deadline)

    @classmethod
    def from_env(cls, deadline: float = 120.0) -> InternetNetwork:
        """Joins the run that FARFLUNG_TICKET leads to; this peer's key is in FARFLUNG_KEY, by default ./peer.key.

        FARFLUNG_LISTEN and FARFLUNG_PORT say where it listens. Raises UserError.
        """
        ticket = ticket_from_env()
        return cls(Peers(ticket, identity_from_env(), listen_from_env(), newcomer_info(ticket)), deadline=deadline)

    @property
    def elastic(self) -> ElasticNetwork:
        """See Network."""
        return self

    def keep(self, cells: Sequence[str], here: Collection[str]) -> None:
        """See ElasticNetwork. The first process of an island learns it of the others, with where their doors are."""
        self._doorkeeper.cells = tuple(cells)
        if self._beside:
            told = shared(self._beside, door_frame(self.peers, cells, here), "doors", self._deadline)
            self._doorkeeper.own = doors_in(told, len(cells))
            self.peers.info["doors"] = len(told)

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """See ElasticNetwork. Who cannot come soon is not waited for."""
        patience_s = self._patience.seconds(key)

        async def meet(_: object) -> T:
            IN_BACKGROUND.set(True)
            party = await self._matchmaker.meet(wanted, key, step, weight, lineage, patience_s)
            self._patience.ended(party, wanted)
            return await self.peers.background.waiting(then, await self._seated(party, key))

        return self.begin(wanted, meet)

    async def _seated(self, party: Party, key: str) -> Party:
        """A party, and who keeps what in it; tells that to the island's other processes. Raises PeerLostError."""
        doors = await self._doorkeeper.of(party.group)
        if self._beside:
            members = [member for rank in party.group if (member := self.peers.members.by_rank.get(rank))]
            told = party_frame(party, doors, members)
            share = partial(shared, self._beside, told, party_key(key), self._deadline)
            await self.peers.background.waiting(share)
        return seated(party, doors, self._doorkeeper.cells, self.peers)

    def stand_by(self, step: int) -> None:
        """Says that this peer is about to train on from a step: others then count on it in their first round."""
        with contextlib.suppress(TimeoutError):  # one that is silent shall hold up nobody
            self.peers.background.run(self.peers.announce(trains=True, step=step), self._deadline)

    @property
    def wanted(self) -> bool:
        """See ElasticNetwork."""
        return self._snapshots.due

    @property
    def keeps(self) -> bool:
        """See ElasticNetwork; there is nowhere to keep it."""
        return False

    def give(self, state: SharedState) -> None:
        """See ElasticNetwork."""
        self._snapshots.give(state)

    def expect_model(self, shapes: str, values: int) -> None:
        """Announces the model, by a hash of its shapes and its number of values, once it is known.

        Raises UserError when the run's peers have another.
        """
        self._announce(shapes)
        self._transport.expect_values(values)
        self._states.largest = 4 * self._transport.largest

    def behind(self, step: int) -> float | None:
        """How many steps the others are ahead of one; None when nobody else trains."""
        median = self.peers.members.median_step()
        return None if median is None else median - step

    def prefetch(self, identical: bool) -> None:
        """Starts the download that the next `fetch` yields."""
        self._prefetched = self.fetch(identical)

    def fetch(self, identical: bool) -> Pending[SharedState]:
        """See ElasticNetwork."""
        begun, self._prefetched = self._prefetched, None
        self.peers.info["trains"] = False  # until its next step: nobody waits for it, or asks it for the state
        return begun or self.begin(self.members(), lambda _: self._states.fetch(identical))

    def state_of(self, stage: int) -> SharedState:
        """See `asked_for`."""
        return self.peers.background.run(self.asked_for(stage), LONGEST_FETCH_SECONDS)

    async def asked_for(self, stage: int) -> SharedState:
        """What the peers of any stage of a swarm have. Raises PeerLostError where nobody gives it."""
        return await Fetching(self.peers, self._states.largest, stall_of(self._deadline), None, stage).fetch(False)

    def lend(self, copies: Callable[[int], SharedState | None]) -> None:
        """Lets others have the copies of the states of stages that nobody serves any more."""
        self._snapshots.lent = copies

    def accept(self) -> None:
        """See ElasticNetwork."""
        self._states.accept()

    def reject(self, state: SharedState, why: str) -> None:
        """See ElasticNetwork."""
        for rank in state.givers:
            if member := self.peers.members.by_rank.get(rank):
                self._states.refuse(member, "bad state", why)

    def invitation(self) -> Ticket:
        """The run's ticket as it is now: to this peer and the others that are there."""
        return self.peers.ticket.at(self.peers.addresses)

    def close(self) -> None:
        """Leaves the run."""
        self.peers.close()
