"""Who takes part in a round: any peer can be its host, which makes groups of the peers that come to it.

The round's name and the members determine its host; a host that is not there is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from farflung.networks.base import Group, Party
from farflung.networks.internet.frames import Frame, FrameError, entry, number, reading, whole
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.members import FURTHEST, LAST_RANK, arrives
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError

WAITED_SHARE = 0.25
"""The part of the time between two rounds for which a peer waits for others."""
FIRST_ROUND_SECONDS = 20.0
"""How long the first round is expected to take."""
LOOK_SECONDS = 0.1
"""Seconds between two checks whether missing peers can still come."""
LONGEST_PATIENCE_SECONDS = 600.0
HEAVIEST = 10.0
"""The largest weight in a group, in multiples of the least."""
MOST = 4096
"""Peers of a round at most."""
RENDEZVOUS_KEPT = 256
HOSTS_TRIED = 3


@dataclass
class Guest:
    """A peer that has come to a round."""

    rank: int
    wants: frozenset[int]
    step: int
    weight: float
    anchor_digest: str
    until: float
    answer: asyncio.Future[Frame]


@dataclass
class Rendezvous:
    """A round at its host."""

    waiting: dict[int, Guest] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class Matchmaker:
    """Finds this peer's group in each round, and hosts others' rounds. All methods run in the peers' thread."""

    def __init__(self, peers: Peers, longest_s: float) -> None:
        self._peers = peers
        self._longest_s = longest_s
        self._met: dict[str, float] = {}
        self._rendezvous: OrderedDict[str, Rendezvous] = OrderedDict()
        peers.handlers["meet"] = self._on_meet

    def patience_s(self, key: str) -> float:
        """How long to wait for others at a round that begins now, by the time since the last of its fragment."""
        fragment, now = key.rpartition(" of ")[2], time.monotonic()
        between = now - self._met.get(fragment, now - FIRST_ROUND_SECONDS)
        self._met[fragment] = now
        return min(max(1.0, WAITED_SHARE * between), self._longest_s)

    async def meet(
        self, wanted: Group, key: str, step: int, weight: float, anchor_digest: str, patience_s: float
    ) -> Party:
        """The group of those who came to a round; see Network. Never fails: at worst this peer stays alone."""
        request = {"wants": list(wanted), "key": key, "step": step, "weight": weight, "lineage": anchor_digest}
        request["patience"] = patience_s
        own = self._peers.info["rank"]
        for host in self._hosts(key)[:HOSTS_TRIED]:
            if host == own:
                return party_of(await self._welcome(own, request), own, weight)
            member = self._peers.members.by_rank.get(host)
            if member is None:
                continue  # it has been gone for too long meanwhile
            try:
                answer = await self._peers.ask(member, {"kind": "meet", **request}, patience_s + PROMPT_SECONDS)
                return party_of(answer, own, weight)
            except FrameError as error:
                self._peers.guard.strike(member.peer, "bad answer", str(error))
            except (*UNREACHABLE, RequestRefusedError):
                self._peers.members.failed(host)
        return Party((), {})

    def _hosts(self, key: str) -> list[int]:
        """Who may host a round, in the order in which they are to be asked."""
        return sorted(self._expected(), key=lambda rank: hashlib.sha256(f"{key} {rank}".encode()).digest())

    def _expected(self) -> list[int]:
        return [member.rank for member in self._peers.members.training()] + [self._peers.info["rank"]]

    async def _on_meet(self, stream: PeerStream, frame: Frame) -> None:
        answer = await self._welcome(stream.member.rank, frame)
        with contextlib.suppress(*UNREACHABLE):
            await stream.tell(answer)

    async def _welcome(self, rank: int, request: Frame) -> Frame:
        """Admits a peer, and yields its group in the end."""
        guest, key = guest_of(request, rank)
        self._peers.members.heard_step(rank, guest.step)
        rendezvous = self._rendezvous_of(key)
        if rank in rendezvous.waiting:
            raise FrameError("a peer came to a round twice")
        rendezvous.waiting[rank] = guest
        rendezvous.gone.discard(rank)
        try:
            self._settle(rendezvous)
            while not guest.answer.done():
                await asyncio.wait([guest.answer], timeout=LOOK_SECONDS)
                self._settle(rendezvous)
            return guest.answer.result()
        finally:
            rendezvous.waiting.pop(rank, None)

    def _rendezvous_of(self, key: str) -> Rendezvous:
        rendezvous = self._rendezvous.setdefault(key, Rendezvous())
        self._rendezvous.move_to_end(key)
        while len(self._rendezvous) > RENDEZVOUS_KEPT:
            self._rendezvous.popitem(last=False)
        return rendezvous

    def _settle(self, rendezvous: Rendezvous) -> None:
        """Makes groups of guests that need not wait for anybody else."""
        for guest in list(rendezvous.waiting.values()):
            if guest.wants and guest.rank in rendezvous.waiting and guest.wants <= rendezvous.waiting.keys():
                _bring_together([rendezvous.waiting[rank] for rank in guest.wants], rendezvous)
        now = asyncio.get_running_loop().time()
        free = [
            guest
            for guest in rendezvous.waiting.values()
            if guest.until <= now or not any(self._comes(rank, guest, rendezvous) for rank in guest.wants)
        ]
        if not free:
            return
        if any(len(guest.wants) > 2 for guest in free):
            _bring_together(list(rendezvous.waiting.values()), rendezvous)
            return
        for begin in range(0, len(free) - 1, 2):
            _bring_together(free[begin : begin + 2], rendezvous)
        if len(free) % 2 and (free[-1].until <= now or not self._anybody(free[-1], rendezvous)):
            _bring_together(free[-1:], rendezvous)

    def _anybody(self, guest: Guest, rendezvous: Rendezvous) -> bool:
        """Whether a guest may still find a partner, among those here or expected."""
        return len(rendezvous.waiting) > 1 or any(self._comes(rank, guest, rendezvous) for rank in self._expected())

    def _comes(self, rank: int, guest: Guest, rendezvous: Rendezvous) -> bool:
        """Whether a missing peer can still come while a guest waits."""
        if rank in rendezvous.waiting or rank in rendezvous.gone:
            return False
        left = guest.until - asyncio.get_running_loop().time()
        info = self._peers.info
        if rank == info["rank"]:
            return bool(info["trains"]) and arrives(info["step"], info["rate"], guest.step, left)
        member = self._peers.members.by_rank.get(rank)
        return member is not None and member.alive and member.arrives(guest.step, left)


@reading("a request to meet")
def guest_of(request: Frame, rank: int) -> tuple[Guest, str]:
    """Who asks to be let in, from now on, and the name of the round. Raises FrameError."""
    wants = entry(request, "wants", list)
    if len(wants) > MOST:
        raise FrameError("a peer wants to meet too many")
    loop = asyncio.get_running_loop()
    guest = Guest(
        rank,
        frozenset(whole(wanted, LAST_RANK) for wanted in wants),
        whole(request.get("step"), FURTHEST),
        number(request.get("weight")),
        entry(request, "lineage", str),
        loop.time() + min(number(request.get("patience")), LONGEST_PATIENCE_SECONDS),
        loop.create_future(),
    )
    return guest, entry(request, "key", str)


@reading("a host's answer")
def party_of(answer: Frame, own: int, weight: float) -> Party:
    """The party that a host says a peer is in. Raises FrameError when that cannot be.

    The own weight is not the host's to say, and none is more than HEAVIEST times the least: host and guests may lie.
    All members find the same weights, or their anchors would part.
    """
    told = entry(answer, "weights", list)
    if len(told) > MOST:
        raise FrameError("a host says that too many have come")
    weights = {whole(rank, LAST_RANK): number(heavy) for rank, heavy in told}
    if weights and own not in weights:
        raise FrameError("a host has left out who asked")
    if weights:
        weights[own] = weight
    heaviest = HEAVIEST * max(min((heavy for heavy in weights.values() if heavy > 0), default=0.0), 1.0)
    weights = {rank: min(heavy, heaviest) for rank, heavy in weights.items()}
    return Party(tuple(sorted(weights)), weights, bool(answer.get("behind")))


def _bring_together(guests: list[Guest], rendezvous: Rendezvous) -> None:
    """Makes a group of those with the most common anchors; the others are behind."""
    count = Counter(guest.anchor_digest for guest in guests)
    common = max(count, key=lambda anchor_digest: (count[anchor_digest], anchor_digest))
    weights = [(guest.rank, guest.weight) for guest in guests if guest.anchor_digest == common]
    for guest in guests:
        behind = guest.anchor_digest != common
        if not guest.answer.done():
            guest.answer.set_result({"weights": [] if behind else weights, "behind": behind})
        rendezvous.waiting.pop(guest.rank, None)
        rendezvous.gone.add(guest.rank)
