"""Doors: processes of an island have connections of their own, by which the keepers of a cell exchange it.

The island is one member still. Its first process is on the run's network, and says where its doors are.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from farflung.errors import UserError
from farflung.networks.base import Group, Network, Party, PeerLostError, Pending, fact_in, fact_packet
from farflung.networks.following import FollowingNetwork
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.internet.examination import answer_probes
from farflung.networks.internet.exchanges import Exchanges
from farflung.networks.internet.transport import LARGEST_MESSAGE, PacketTransport, stall_of
from farflung.networks.peers.frames import (
    SLOWEST,
    Frame,
    FrameError,
    entry,
    parsed,
    plain,
    read_payload,
    reading,
    whole,
    write_payload,
)
from farflung.networks.peers.identity import is_peer, rank_of
from farflung.networks.peers.member import LONGEST_WORD, MOST_DOORS, Member, addresses_in
from farflung.networks.transfer import IN_BACKGROUND

T = TypeVar("T")

DOOR_BYTES, KEEPER_BYTES = 1 << 12, 5
"""Bytes that a door of an island, and the keeper of a cell, are described in, at most."""
WHEREABOUTS = "peer", "rank", "session", "host", "addresses"
"""What a process of an island is told of the peers that it meets: it hears no gossip."""
AGAIN_SECONDS = 60.0
"""How long an island whose doors cannot be reached is not asked again."""


@dataclass(frozen=True)
class Doors:
    """Where an island's processes are, and which of them keeps each of the model's cells, in the cells' order."""

    peers: tuple[str, ...]
    sessions: tuple[str, ...]
    addresses: tuple[tuple[str, ...], ...]
    keepers: tuple[int, ...]

    def told(self) -> Frame:
        """As a frame."""
        told = {"peers": self.peers, "sessions": self.sessions, "addresses": self.addresses}
        return {**told, "keepers": self.keepers}

    def seats(self, cells: Sequence[str]) -> dict[str, int]:
        """The rank of the door behind which each cell is kept."""
        ranks = [rank_of(peer) for peer in self.peers]
        return {cell: ranks[keeper] for cell, keeper in zip(cells, self.keepers, strict=True)}


@reading("an island's doors")
def doors_of(told: Frame) -> Doors:
    """The doors that a frame tells of. Raises FrameError."""
    names = "peers", "sessions", "addresses", "keepers"
    peers, sessions, addresses, keepers = (entry(told, name, list) for name in names)
    if not 0 < len(peers) <= MOST_DOORS or not len(sessions) == len(addresses) == len(peers):
        raise FrameError("an island tells of no doors, or of too many")
    for peer, places in zip(peers, addresses, strict=True):
        if not isinstance(peer, str) or not is_peer(peer) or not isinstance(places, list):
            raise FrameError("a door has no peer's id, or no addresses")
    return Doors(
        tuple(peers),
        tuple(str(session)[:LONGEST_WORD] for session in sessions),
        tuple(addresses_in(places, peer) for peer, places in zip(peers, addresses, strict=True)),
        tuple(whole(keeper, len(peers) - 1) for keeper in keepers),
    )


class Doorkeeper:
    """Tells others of this island's doors, if it has some, and learns theirs; runs in the peers' thread."""

    def __init__(self, peers: Peers) -> None:
        self.own: Doors | None = None
        self.cells: Sequence[str] = ()
        self._peers = peers
        self._known: dict[int, tuple[str, Doors]] = {}
        self._failed: dict[int, float] = {}
        peers.handlers["doors"] = self._on_doors

    async def of(self, ranks: Iterable[int]) -> dict[int, Doors]:
        """The doors of those peers that have some; who does not say where is taken to have none, and is lost then."""
        found = await asyncio.gather(*(self._of(rank) for rank in ranks))
        return {rank: doors for rank, doors in found if doors}

    async def _of(self, rank: int) -> tuple[int, Doors | None]:
        if rank == self._peers.identity.rank:
            return rank, self.own
        member = await self._peers.found(rank, PROMPT_SECONDS)
        if member is None or not member.doors:
            return rank, None
        self._forget_the_gone()
        session, doors = self._known.get(rank, ("", None))
        if session == member.session:
            return rank, doors
        if time.monotonic() - self._failed.get(rank, -AGAIN_SECONDS) < AGAIN_SECONDS:
            return rank, None
        try:
            doors = await self._asked(member)
            self._known[rank] = member.session, doors
            return rank, doors
        except FrameError as error:
            self._peers.guard.strike(member.peer, "bad answer", str(error))
            why = str(error)
        except (*UNREACHABLE, RequestRefusedError) as error:
            why = plain(str(error)) or "no answer"
        self._failed[rank] = time.monotonic()
        self._peers.tell(
            f"the processes of {member.described} cannot be reached: {why}; see that the ports of all of them are open "
            "there, or have it join with --gateway"
        )
        return rank, None

    def _forget_the_gone(self) -> None:
        here = self._peers.members.by_rank
        self._known = {rank: known for rank, known in self._known.items() if rank in here}
        self._failed = {rank: at for rank, at in self._failed.items() if rank in here}

    async def _asked(self, member: Member) -> Doors:
        """An island's doors, once each has proven that it is one. Raises as `stream`, and FrameError."""
        async with asyncio.timeout(PROMPT_SECONDS), self._peers.stream(member) as stream:
            await stream.tell({"kind": "doors"})
            largest = DOOR_BYTES * (1 + member.doors) + KEEPER_BYTES * len(self.cells)
            told = bytearray(whole((await stream.hear()).get("size"), largest))
            await read_payload(stream.reader, memoryview(told), PROMPT_SECONDS, SLOWEST)
        doors = await asyncio.to_thread(lambda: doors_of(parsed(bytes(told))))
        if len(doors.keepers) != len(self.cells) or doors.peers[0] != member.peer:
            raise FrameError("an island keeps another number of cells than the model has, or is somebody else")
        async with asyncio.timeout(PROMPT_SECONDS):
            proven = await asyncio.gather(
                *(self._proven(*one) for one in zip(doors.peers[1:], doors.addresses[1:], strict=True))
            )
        if any(door.door_of != member.rank for door in proven):
            raise FrameError("what an island says are its processes are not")
        return doors

    async def _proven(self, peer: str, addresses: Sequence[str]) -> Member:
        """Who is behind a door. Raises as `stream`."""
        try:
            return await self._peers.handshake(peer, addresses)
        except UserError as error:
            raise RequestRefusedError(str(error)) from error

    async def _on_doors(self, stream: PeerStream, frame: Frame) -> None:
        if self.own is None:
            raise RequestRefusedError("this peer has no doors")
        told = json.dumps(self.own.told()).encode()
        await stream.tell({"size": len(told)})
        await write_payload(stream.writer, memoryview(told), PROMPT_SECONDS)


def shared(near: Network, told: Frame, key: str, seconds: float) -> list[Frame]:
    """What each process of an island tells the others. Raises PeerLostError."""
    packet = fact_packet(told)
    try:
        packets = near.exchange(packet, near.members(), key).wait(seconds)
    except PeerLostError as lost:
        raise PeerLostError((), f"the island's processes have lost touch: {lost}") from lost
    return [fact_in(packets[process]) for process in near.members()]


def door_frame(peers: Peers, cells: Sequence[str], here: Collection[str]) -> Frame:
    """Where a process's door is, and the cells that it keeps, for the island's first process."""
    kept = [place for place, cell in enumerate(cells) if cell in here]
    told = {"peer": peers.identity.peer, "session": peers.info["session"], "addresses": peers.info["addresses"]}
    return {**told, "kept": kept}


def doors_in(told: Sequence[Frame], cells: int) -> Doors:
    """An island's doors, of so many cells; see `door_frame`."""
    keepers = [0] * cells
    for process, one in enumerate(told):
        for place in one["kept"]:
            keepers[place] = process
    return Doors(
        tuple(one["peer"] for one in told),
        tuple(one["session"] for one in told),
        tuple(tuple(one["addresses"]) for one in told),
        tuple(keepers),
    )


def party_key(key: str) -> str:
    """Of the exchange in which an island's processes hear who has come to a round."""
    return f"party of {key}"


def party_frame(party: Party, doors: Mapping[int, Doors], members: Iterable[Member]) -> Frame:
    """A party, its members and their doors, for the island's other processes."""
    told = [[rank, one.told()] for rank, one in doors.items()]
    known = [{name: getattr(member, name) for name in WHEREABOUTS} for member in members]
    return {
        "weights": list(party.weights.items()),
        "behind": party.behind,
        "host": party.host,
        "doors": told,
        "members": known,
    }


def party_in(told: Frame) -> tuple[Party, dict[int, Doors], list[Member]]:
    """See `party_frame`."""
    weights = dict(told["weights"])
    doors = {rank: doors_of(one) for rank, one in told["doors"]}
    party = Party(tuple(sorted(weights)), weights, told["behind"], told["host"])
    return party, doors, [Member(**one) for one in told["members"]]


def seated(party: Party, doors: Mapping[int, Doors], cells: Sequence[str], peers: Peers) -> Party:
    """A party with the seats of its members' keepers; these can be reached from now on."""
    peers.doors = {rank: door for rank, door in peers.doors.items() if door.door_of not in doors}
    for rank, one in doors.items():
        for peer, session, addresses in list(zip(one.peers, one.sessions, one.addresses, strict=True))[1:]:
            door = Member(peer, rank_of(peer), session, "", addresses, trains=False, door_of=rank)
            peers.doors[door.rank] = door
    return replace(party, seats={rank: one.seats(cells) for rank, one in doors.items()})


class DoorNetwork(FollowingNetwork):
    """See FollowingNetwork: a process that exchanges what it keeps itself, by a door of its own.

    Args:
        rank: the island's.
        near: of its processes.
        peers: what the door opens to.
        deadline: others are waited for at most so many seconds.
    """

    def __init__(self, rank: int, near: Network, peers: Peers, deadline: float) -> None:
        super().__init__(rank, near)
        self.peers = peers
        self._deadline = deadline
        self._transport = PacketTransport(peers, LARGEST_MESSAGE, stall_of(deadline))
        self._exchanges = Exchanges(rank, peers, self._transport, deadline, {})
        self.traffic = self._transport.traffic
        self._cells: Sequence[str] = ()
        answer_probes(peers)
        peers.start(deadline)

    def expect_model(self, shapes: str, values: int) -> None:
        """See InternetNetwork."""
        self.peers.info["shapes"] = shapes
        self._transport.expect_values(values)

    def keep(self, cells: Sequence[str], here: Collection[str]) -> None:
        """See ElasticNetwork."""
        self._cells = cells
        shared(self.near, door_frame(self.peers, cells, here), "doors", self._deadline)

    def between(self, seats: Mapping[int, int]) -> Network:
        """See ElasticNetwork."""
        return self._exchanges.between(seats)

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """See ElasticNetwork; the first process tells who has come."""

        async def meet(_: object) -> T:
            IN_BACKGROUND.set(True)
            # The first process may wait for others for half a deadline before it tells.
            waiting = self.peers.background.waiting
            told = await waiting(shared, self.near, {}, party_key(key), 2 * self._deadline)
            party, doors, members = party_in(told[0])
            for member in members:
                self.peers.members.hear(member, first_hand=True)
            return await waiting(then, seated(party, doors, self._cells, self.peers))

        return self._exchanges.begin(wanted, meet)

    def close(self) -> None:
        """Closes the door."""
        self.peers.close()
