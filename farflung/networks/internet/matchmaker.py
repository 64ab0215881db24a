"""Who takes part in a round: any peer can be its host, which makes groups of the peers that come to it.

The round's name and the members determine its host; a host that is not there is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field

from farflung.errors import UserError
from farflung.networks.base import Group, Party
from farflung.networks.internet.contact.frames import Frame, FrameError, entry, number, reading, whole
from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.internet.contact.member import FURTHEST, LAST_RANK, Member, arrives
from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.contact.streams import PROMPT_SECONDS, PeerStream, RequestRefusedError

WAITED_SHARE = 0.25
"""The part of the time between two rounds for which a peer waits for others."""
FIRST_ROUND_SECONDS = 20.0
"""How long the first round is expected to take."""
CALL_SECONDS = 0.3
"""How long a host waits before it calls those who have not come."""
CALLED, CALL_AGAIN_SECONDS = 32, 2.0
"""Missing peers that a host calls in a round at most, and how long it then leaves each of them alone."""
LOOK_SECONDS = 0.1
"""Seconds between two checks whether missing peers can still come."""
LONGEST_PATIENCE_SECONDS = 600.0
HEAVIEST = 10.0
"""The largest weight in a group, in multiples of the least."""
MOST = 4096
"""Peers of a round at most."""
SHUNNED = 256
"""Peers at most of which a guest says that it takes none of their messages; a frame has room for few more."""
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
    shuns: frozenset[int]
    """Those whose messages it does not take."""
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
        self._called: dict[int, float] = {}
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
        request |= {"patience": patience_s, "shuns": self._peers.members.shunned()[:SHUNNED]}
        own = self._peers.identity.rank
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
        return [member.rank for member in self._peers.members.training()] + [self._peers.identity.rank]

    async def _on_meet(self, stream: PeerStream, frame: Frame) -> None:
        answer = await self._welcome(stream.member.rank, frame)
        with contextlib.suppress(*UNREACHABLE):
            await stream.tell(answer)

    async def _welcome(self, rank: int, request: Frame) -> Frame:
        """Admits a peer, and yields its group in the end."""
        guest, key = guest_of(request, rank)
        self._peers.members.heard_step(rank, guest.step)
        if key not in self._rendezvous:
            self._peers.background.spawn(self._call_missing(self._rendezvous_of(key)))
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

    async def _call_missing(self, rendezvous: Rendezvous) -> None:
        """Asks those who have not come how far they are: some are dead, and the last news is that they train."""
        await asyncio.sleep(CALL_SECONDS)
        wanted = {rank for guest in rendezvous.waiting.values() for rank in guest.wants}
        missing = sorted(wanted - rendezvous.waiting.keys() - rendezvous.gone)
        members = [member for rank in missing if (member := self._peers.members.by_rank.get(rank)) and member.alive]
        await asyncio.gather(*map(self._call, random.sample(members, min(CALLED, len(members)))))

    async def _call(self, member: Member) -> None:
        now = time.monotonic()
        if now - self._called.get(member.rank, -CALL_AGAIN_SECONDS) < CALL_AGAIN_SECONDS:
            return
        self._called[member.rank] = now
        try:
            await self._peers.handshake(member.peer)
        except TimeoutError:
            pass  # it may only be busy
        except (*UNREACHABLE, UserError, FrameError, RequestRefusedError):
            self._peers.members.failed(member.rank)

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
        if rank == self._peers.identity.rank:
            return bool(info["trains"]) and arrives(info["step"], info["rate"], guest.step, left)
        member = self._peers.members.by_rank.get(rank)
        if member is None or not member.alive or not member.trains or rank in guest.shuns:
            return False
        return member.arrives(guest.step, left)


@reading("a request to meet")
def guest_of(request: Frame, rank: int) -> tuple[Guest, str]:
    """Who asks to be let in, from now on, and the name of the round. Raises FrameError."""
    wants, shuns = entry(request, "wants", list), entry(request, "shuns", list)
    if len(wants) > MOST or len(shuns) > SHUNNED:
        raise FrameError("a peer tells of too many others")
    loop = asyncio.get_running_loop()
    guest = Guest(
        rank,
        frozenset(whole(wanted, LAST_RANK) for wanted in wants),
        whole(request.get("step"), FURTHEST),
        number(request.get("weight")),
        entry(request, "lineage", str),
        frozenset(whole(shunned, LAST_RANK) for shunned in shuns),
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
    """Makes a group of those who take each other's messages; the others stay alone.

    Whom half of them shun is left out. Who shuns one of those that are left would wait for its message in vain.
    """
    against = Counter(rank for guest in guests for rank in guest.shuns)
    liked = {guest.rank for guest in guests if 2 * against[guest.rank] < len(guests)}
    together = {guest.rank: guest for guest in guests if guest.rank in liked and not guest.shuns & liked}
    alone = [[guest] for guest in guests if guest.rank not in together]
    for group in ([[*together.values()]] if together else []) + alone:
        _group(group, rendezvous)


def _group(guests: list[Guest], rendezvous: Rendezvous) -> None:
    """Makes a group of those with the most common anchors, among equals with more work; the others are behind."""
    weights_of: defaultdict[str, list[float]] = defaultdict(list)
    for guest in guests:
        weights_of[guest.anchor_digest].append(guest.weight)
    common = max(weights_of, key=lambda anchors: (len(weights_of[anchors]), sum(weights_of[anchors]), anchors))
    weights = [(guest.rank, guest.weight) for guest in guests if guest.anchor_digest == common]
    for guest in guests:
        behind = guest.anchor_digest != common
        if not guest.answer.done():
            guest.answer.set_result({"weights": [] if behind else weights, "behind": behind})
        rendezvous.waiting.pop(guest.rank, None)
        rendezvous.gone.add(guest.rank)
