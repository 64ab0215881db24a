"""Who takes part in a round: any peer can be its host, who brings those together that come to it.

A round's host follows from its name and who is there, so nobody need be asked; a host that is not there is passed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from farflung.networks.base import Group, Party
from farflung.networks.internet.admission import FURTHEST
from farflung.networks.internet.frames import Frame, FrameError, entry, number, reading, whole, write_frame
from farflung.networks.internet.host import UNREACHABLE
from farflung.networks.internet.lines import PROMPT_SECONDS, Line, RequestRefusedError
from farflung.networks.internet.members import arrives
from farflung.networks.internet.swarm import Swarm

LOOKS_EVERY = 0.1
"""Seconds between two looks at whether those who have not come can still be expected."""
LONGEST_PATIENCE = 600.0
HEAVIEST = 10.0
"""How many times the own weight another's may be."""
MOST = 4096
"""Peers of a round at most."""
LAST_RANK = (1 << 31) - 1
GATHERINGS = 256
HOSTS_TRIED = 3


@dataclass
class Guest:
    """One who has come to a round."""

    rank: int
    wants: frozenset[int]
    step: int
    weight: float
    lineage: str
    until: float
    answer: asyncio.Future[Frame]


@dataclass
class Gathering:
    """A round at its host."""

    waiting: dict[int, Guest] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)


class Matchmaker:
    """Finds this peer's group in each round, and hosts others' rounds; all methods run in the swarm's thread.

    Args:
        swarm: the peers.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._gatherings: OrderedDict[str, Gathering] = OrderedDict()
        swarm.handlers["meet"] = self._on_meet

    async def meet(self, wanted: Group, key: str, step: int, weight: float, lineage: str, patience: float) -> Party:
        """The group of those who came to a round; see Network. Never fails: at worst this peer stays alone."""
        request = {"wants": list(wanted), "key": key, "step": step, "weight": weight, "lineage": lineage}
        request["patience"] = patience
        own = self._swarm.about["rank"]
        for host in self._hosts(key)[:HOSTS_TRIED]:
            if host == own:
                return party_of(await self._welcome(own, request), own, weight)
            member = self._swarm.members.by_rank.get(host)
            if member is None:
                continue  # it has been gone for too long meanwhile
            try:
                answer = await self._swarm.ask(member, {"kind": "meet", **request}, patience + PROMPT_SECONDS)
                return party_of(answer, own, weight)
            except FrameError as error:
                self._swarm.guard.strike(member.peer, "bad answer", str(error))
            except (*UNREACHABLE, RequestRefusedError):
                self._swarm.members.failed(host)
        return Party((), {})

    def _hosts(self, key: str) -> list[int]:
        """Who may host a round, in the order in which they are to be asked."""
        ranks = [member.rank for member in self._swarm.members.training()] + [self._swarm.about["rank"]]
        return sorted(ranks, key=lambda rank: hashlib.sha256(f"{key} {rank}".encode()).digest())

    async def _on_meet(self, line: Line, frame: Frame) -> None:
        answer = await self._welcome(line.member.rank, frame)
        with contextlib.suppress(*UNREACHABLE):
            async with asyncio.timeout(PROMPT_SECONDS):
                await write_frame(line.writer, answer)

    async def _welcome(self, rank: int, request: Frame) -> Frame:
        """Lets one in, and yields the group that it is in, in the end."""
        guest, key = guest_of(request, rank)
        self._swarm.members.heard_step(rank, guest.step)
        gathering = self._gathering(key)
        if rank in gathering.waiting:
            raise FrameError("a peer came to a round twice")
        gathering.waiting[rank] = guest
        gathering.gone.discard(rank)
        try:
            self._settle(gathering)
            while not guest.answer.done():
                await asyncio.wait([guest.answer], timeout=LOOKS_EVERY)
                self._settle(gathering)
            return guest.answer.result()
        finally:
            gathering.waiting.pop(rank, None)

    def _gathering(self, key: str) -> Gathering:
        gathering = self._gatherings.setdefault(key, Gathering())
        self._gatherings.move_to_end(key)
        while len(self._gatherings) > GATHERINGS:
            self._gatherings.popitem(last=False)
        return gathering

    def _settle(self, gathering: Gathering) -> None:
        """Brings those together who need not wait for anybody else."""
        for guest in list(gathering.waiting.values()):
            if guest.wants and guest.rank in gathering.waiting and guest.wants <= gathering.waiting.keys():
                _bring_together([gathering.waiting[rank] for rank in guest.wants], gathering)
        now = asyncio.get_running_loop().time()
        free = [
            guest
            for guest in gathering.waiting.values()
            if guest.until <= now or not any(self._comes(rank, guest, gathering) for rank in guest.wants)
        ]
        if not free:
            return
        size = max(len(guest.wants) for guest in free)
        if size > 2:
            _bring_together(list(gathering.waiting.values()), gathering)
            return
        for begin in range(0, len(free) - 1, 2):
            _bring_together(free[begin : begin + 2], gathering)
        if len(free) % 2 and (free[-1].until <= now or not self._anybody(free[-1], gathering)):
            _bring_together(free[-1:], gathering)

    def _anybody(self, guest: Guest, gathering: Gathering) -> bool:
        """Whether there is, or can be expected, anyone whom a guest might yet be brought together with."""
        ranks = [member.rank for member in self._swarm.members.training()] + [self._swarm.about["rank"]]
        return len(gathering.waiting) > 1 or any(self._comes(rank, guest, gathering) for rank in ranks)

    def _comes(self, rank: int, guest: Guest, gathering: Gathering) -> bool:
        """Whether one who has not been there yet can be expected while a guest has patience."""
        if rank in gathering.waiting or rank in gathering.gone:
            return False
        left = guest.until - asyncio.get_running_loop().time()
        about = self._swarm.about
        if rank == about["rank"]:
            return bool(about["trains"]) and arrives(about["step"], about["rate"], guest.step, left)
        member = self._swarm.members.by_rank.get(rank)
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
        loop.time() + min(number(request.get("patience")), LONGEST_PATIENCE),
        loop.create_future(),
    )
    return guest, entry(request, "key", str)


@reading("a host's answer")
def party_of(answer: Frame, own: int, weight: float) -> Party:
    """The party that a host says a peer is in. Raises FrameError when that cannot be.

    The own weight counts as it is, whatever the host says, and no other more than HEAVIEST times that: a host may lie,
    and so may those who come.
    """
    told = entry(answer, "weights", list)
    if len(told) > MOST:
        raise FrameError("a host says that too many have come")
    heaviest = HEAVIEST * max(weight, 1.0)
    weights = {whole(rank, LAST_RANK): min(number(heavy), heaviest) for rank, heavy in told}
    if weights and own not in weights:
        raise FrameError("a host has left out who asked")
    if weights:
        weights[own] = weight
    return Party(tuple(sorted(weights)), weights, bool(answer.get("behind")))


def _bring_together(guests: list[Guest], gathering: Gathering) -> None:
    """Makes a group of those who stand where most of them stand; the others are behind."""
    count = Counter(guest.lineage for guest in guests)
    common = max(count, key=lambda lineage: (count[lineage], lineage))
    weights = [(guest.rank, guest.weight) for guest in guests if guest.lineage == common]
    for guest in guests:
        behind = guest.lineage != common
        answer: dict[str, Any] = {"weights": [] if behind else weights, "behind": behind}
        if not guest.answer.done():
            guest.answer.set_result(answer)
        gathering.waiting.pop(guest.rank, None)
        gathering.gone.add(guest.rank)
