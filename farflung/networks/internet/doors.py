"""Doors: processes of an island have connections of their own, by which the keepers of a cell exchange it.

The island is one member still. Its first process is on the run's network, and says where its doors are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from farflung.networks.base import Group, Network, Party, PeerLostError, Pending, packet_of, words_of
from farflung.networks.following import FollowingNetwork
from farflung.networks.internet.examination import answer_probes
from farflung.networks.internet.exchanges import Exchanges
from farflung.networks.internet.frames import (
    Frame,
    FrameError,
    entry,
    parsed,
    read_payload,
    reading,
    whole,
    write_payload,
)
from farflung.networks.internet.host import UNREACHABLE, leads_to
from farflung.networks.internet.identity import rank_of
from farflung.networks.internet.members import MOST_DOORS, Member
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError
from farflung.networks.internet.transport import LARGEST_MESSAGE, PacketTransport, stall_of
from farflung.networks.transfer import IN_BACKGROUND

T = TypeVar("T")

Lost = tuple[list[int], str]
"""Who could not be asked where its processes are, and why."""

LARGEST = 1 << 24
"""Bytes that an island's doors and keepers are described in, at most."""
SLOWEST = 2e4
"""The least bytes a second in which they come."""
MOST_ADDRESSES = 32


@dataclass(frozen=True)
class Doors:
    """Where an island's processes are, and which of them keeps each of the model's cells, in the cells' order."""

    peers: tuple[str, ...]
    addresses: tuple[tuple[str, ...], ...]
    keepers: tuple[int, ...]

    def told(self) -> Frame:
        """As a frame."""
        return {"peers": self.peers, "addresses": self.addresses, "keepers": self.keepers}

    def seats(self, cells: Sequence[str]) -> dict[str, int]:
        """The rank of the door behind which each cell is kept."""
        ranks = [rank_of(peer) for peer in self.peers]
        return {cell: ranks[keeper] for cell, keeper in zip(cells, self.keepers, strict=True)}


@reading("an island's doors")
def doors_of(told: Frame) -> Doors:
    """The doors that a frame tells of. Raises FrameError."""
    peers, addresses, keepers = (entry(told, name, list) for name in ("peers", "addresses", "keepers"))
    if not 0 < len(peers) <= MOST_DOORS or len(addresses) != len(peers):
        raise FrameError("an island tells of no doors, or of too many")
    for peer, places in zip(peers, addresses, strict=True):
        if not isinstance(peer, str) or len(places) > MOST_ADDRESSES or not all(leads_to(one, peer) for one in places):
            raise FrameError("an address that is said to lead to a door does not")
    return Doors(
        tuple(peers),
        tuple(tuple(places) for places in addresses),
        tuple(whole(keeper, len(peers) - 1) for keeper in keepers),
    )


class Doorkeeper:
    """Tells others of this island's doors, if it has some, and learns theirs; runs in the peers' thread."""

    def __init__(self, peers: Peers) -> None:
        self.own: Doors | None = None
        self.cells: Sequence[str] = ()
        self._peers = peers
        self._known: dict[int, tuple[str, Doors]] = {}
        peers.handlers["doors"] = self._on_doors

    async def of(self, ranks: Iterable[int]) -> tuple[dict[int, Doors], Lost | None]:
        """The doors of those peers that have some, and who does not say."""
        found, lost = {}, None
        for rank, doors in await asyncio.gather(*(self._of(rank) for rank in ranks)):
            if isinstance(doors, Doors):
                found[rank] = doors
            elif doors:
                lost = ([rank], doors)
        return found, lost

    async def _of(self, rank: int) -> tuple[int, Doors | str | None]:
        if rank == self._peers.info["rank"]:
            return rank, self.own
        member = await self._peers.found(rank, PROMPT_SECONDS)
        if member is None or not member.doors:
            return rank, None
        session, doors = self._known.get(rank, ("", None))
        if doors and session == member.session:
            return rank, doors
        try:
            doors = await self._asked(member)
        except FrameError as error:
            self._peers.guard.strike(member.peer, "bad answer", str(error))
            why = str(error)
        except (*UNREACHABLE, RequestRefusedError) as error:
            why = str(error) or "it does not answer"
        else:
            self._known[rank] = member.session, doors
            return rank, doors
        return rank, f"{member.described} does not say where its processes are: {why}"

    async def _asked(self, member: Member) -> Doors:
        """Raises FrameError, RequestRefusedError and UNREACHABLE."""
        async with asyncio.timeout(PROMPT_SECONDS), self._peers.stream(member) as stream:
            await stream.tell({"kind": "doors"})
            told = bytearray(whole((await stream.hear()).get("size"), LARGEST))
            await read_payload(stream.reader, memoryview(told), PROMPT_SECONDS, SLOWEST)
        doors = doors_of(parsed(bytes(told)))
        if len(doors.keepers) != len(self.cells):
            raise FrameError("an island keeps another number of cells than the model has")
        return doors

    async def _on_doors(self, stream: PeerStream, frame: Frame) -> None:
        if self.own is None:
            raise RequestRefusedError("this peer has no doors")
        told = json.dumps(self.own.told()).encode()
        await stream.tell({"size": len(told)})
        await write_payload(stream.writer, memoryview(told), PROMPT_SECONDS)
        await stream.hear_the_end(PROMPT_SECONDS)


def shared(near: Network, told: Frame, key: str, seconds: float) -> list[Frame]:
    """What each process of an island tells the others. Raises PeerLostError."""
    packet = packet_of(json.dumps(told).encode())
    try:
        packets = near.exchange(packet, near.members(), key).wait(seconds)
    except PeerLostError as lost:
        raise PeerLostError((), f"the island's processes have lost touch: {lost}") from lost
    return [parsed(words_of(packets[process])) for process in near.members()]


def door_frame(peers: Peers, cells: Sequence[str], here: Collection[str]) -> Frame:
    """Where a process's door is, and the cells that it keeps, for the island's first process."""
    kept = [place for place, cell in enumerate(cells) if cell in here]
    return {"peer": peers.identity.peer, "addresses": peers.info["addresses"], "kept": kept}


def doors_in(told: Sequence[Frame], cells: int) -> Doors:
    """An island's doors, of so many cells; see `door_frame`."""
    keepers = [0] * cells
    for process, one in enumerate(told):
        for place in one["kept"]:
            keepers[place] = process
    return Doors(tuple(one["peer"] for one in told), tuple(tuple(one["addresses"]) for one in told), tuple(keepers))


def party_key(key: str) -> str:
    """Of the exchange in which an island's processes hear who has come to a round."""
    return f"party of {key}"


def party_frame(party: Party, doors: Mapping[int, Doors], lost: Lost | None) -> Frame:
    """A party and its members' doors, for the island's other processes."""
    told = [[rank, one.told()] for rank, one in doors.items()]
    return {"weights": list(party.weights.items()), "behind": party.behind, "doors": told, "lost": lost}


def party_in(told: Frame) -> tuple[Party, dict[int, Doors]]:
    """See `party_frame`. Raises PeerLostError."""
    if told["lost"]:
        raise PeerLostError(*told["lost"])
    weights = dict(told["weights"])
    doors = {rank: doors_of(one) for rank, one in told["doors"]}
    return Party(tuple(sorted(weights)), weights, told["behind"]), doors


def seated(party: Party, doors: Mapping[int, Doors], cells: Sequence[str], peers: Peers) -> Party:
    """A party with the seats of its members' keepers; these can be reached from now on."""
    for rank, one in doors.items():
        for peer, addresses in zip(one.peers, one.addresses, strict=True):
            door = Member(peer, rank_of(peer), "", "", "", addresses, trains=False, door_of=rank)
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
        self._blamed: list[tuple[int, str]] = []
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
            blamed, self._blamed = self._blamed, []
            # The first process may wait for others for half a deadline before it tells.
            waiting = self.peers.background.waiting
            told = await waiting(shared, self.near, {"blamed": blamed}, party_key(key), 2 * self._deadline)
            return await waiting(then, seated(*party_in(told[0]), self._cells, self.peers))

        return self._exchanges.begin(wanted, meet)

    def blame(self, rank: int, why: str) -> None:
        """See ElasticNetwork; the first process hears of it at the next round."""
        self._blamed.append((rank, why))

    def close(self) -> None:
        """Closes the door."""
        self.peers.close()
