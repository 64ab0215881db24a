"""The members that this peer knows of."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from farflung.networks.internet.contact.frames import Frame, FrameError, entry, number, reading, whole
from farflung.networks.internet.contact.host import leads_to
from farflung.networks.internet.contact.identity import peer_of, rank_of

ALIVE_SECONDS = 20.0
"""A member that was not heard for so long counts as gone."""
REMEMBERED_SECONDS = 3600.0
"""A gone member is looked for this much longer."""
BEAT_SECONDS = 3.0
"""How often a peer renews its record, and reads the others'."""
CAUTION = 0.8
"""The part of a peer's expected steps since it was last heard that is counted on."""


FACTS = ("loss", "tokens_per_second", "rounds", "refused", "processes")
"""The facts that a peer publishes, all numbers."""
LARGEST_FACT = 1e15
FASTEST, FURTHEST = 1e6, 1 << 40
"""Steps a second, and steps, that nobody has."""
LAST_BEAT = 1 << 53
LAST_RANK = (1 << 31) - 1
MOST_DOORS = 256


@dataclass
class Member:
    """A peer that has proven its membership, and its latest peer info."""

    peer: str
    rank: int
    public: str
    session: str
    host: str
    addresses: tuple[str, ...]
    beat: int = 0
    step: int = 0
    rate: float = 0.0
    trains: bool = True
    shapes: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    doors: int = 0
    """Processes with connections of their own, of an island that has some."""
    door_of: int | None = None
    """The rank of the island whose process it is; it is none itself."""
    heard: float = field(default_factory=time.monotonic)
    failed: bool = False

    @property
    def alive(self) -> bool:
        """Whether it is believed to be there."""
        return not self.failed and time.monotonic() - self.heard < ALIVE_SECONDS

    @property
    def described(self) -> str:
        """Its name in messages."""
        return f"{self.host} ({self.peer[-3:]})"

    def step_now(self, caution: float = CAUTION) -> float:
        """The step that it has reached at least, by its last record; is likely at, with a caution of 1."""
        return self.step + caution * self.rate * (time.monotonic() - self.heard)

    def step_at_most(self) -> float:
        """The step that it may have reached; its last record may be a beat old, and its rate unknown."""
        if not self.rate:
            return math.inf
        return self.step + 1 + self.rate * (time.monotonic() - self.heard + BEAT_SECONDS) / CAUTION

    def arrives(self, goal: int, seconds: float) -> bool:
        """Whether it has not passed a step yet, and can reach it within so many seconds."""
        elapsed = time.monotonic() - self.heard + BEAT_SECONDS + seconds  # what was heard may be a beat old
        return arrives(self.step, self.rate, goal, elapsed)


def arrives(step: int, rate: float, goal: int, seconds: float) -> bool:
    """Whether one that was at a step, and may be at the end of the next, can be at a later one in so many seconds."""
    return step <= goal and (rate == 0 or step + 1 + rate * seconds / CAUTION >= goal)


@reading("what a peer says of itself")
def member_of(info: Frame, peer: str) -> Member:
    """The member that a peer says it is. Raises FrameError when that cannot be."""
    public = entry(info, "public", str)
    if peer_of(public) != peer or entry(info, "rank", int) != rank_of(peer):
        raise FrameError("a peer's key is not its own")
    addresses = entry(info, "addresses", list)
    if len(addresses) > 32 or not all(isinstance(address, str) and leads_to(address, peer) for address in addresses):
        raise FrameError("an address that a peer says is its own is none")
    return Member(
        peer=peer,
        rank=rank_of(peer),
        public=public,
        session=entry(info, "session", str)[:64],
        host=re.sub(r"[^\w.-]", "?", entry(info, "host", str)[:64]),
        addresses=tuple(addresses),
        beat=whole(info.get("beat"), LAST_BEAT),
        step=whole(info.get("step"), FURTHEST),
        rate=number(info.get("rate"), most=FASTEST),
        trains=entry(info, "trains", bool),
        shapes=entry(info, "shapes", str)[:64],
        facts=_facts_in(entry(info, "facts", dict)),
        doors=whole(info.get("doors", 0), MOST_DOORS),
        door_of=None if info.get("door_of") is None else whole(info["door_of"], LAST_RANK),
    )


def _facts_in(told: Frame) -> dict[str, float]:
    facts = {}
    for name in FACTS:
        with contextlib.suppress(FrameError):
            number(told.get(name), -LARGEST_FACT, LARGEST_FACT)
            facts[name] = told[name]
    return facts


class Members:
    """The table of all that were heard of, by rank; without this peer itself.

    Whom `shuns` is true of, by libp2p id, takes part in nothing, though it is there.
    """

    def __init__(self, shuns: Callable[[str], bool] = lambda peer: False) -> None:
        self.by_rank: dict[int, Member] = {}
        self._shuns = shuns

    def hear(self, news: Member) -> bool:
        """Records a peer's info; whether it was news."""
        known = self.by_rank.get(news.rank)
        if known and known.session == news.session:
            if news.beat <= known.beat:
                return False
            news.step = max(news.step, known.step)  # it may have said so by the way since it wrote its record
        self.by_rank[news.rank] = news
        return True

    def heard_step(self, rank: int, step: int) -> None:
        """Records a step that a peer has mentioned."""
        if member := self.by_rank.get(rank):
            member.step, member.heard, member.failed = max(member.step, step), time.monotonic(), False

    def failed(self, rank: int) -> None:
        """Records that a peer could not be reached; it is gone until it is heard again."""
        if member := self.by_rank.get(rank):
            member.failed = True

    def all(self) -> list[Member]:
        """Everyone, in order of rank; a copy, since the peers' thread may hear of others meanwhile."""
        return sorted(self.by_rank.values(), key=lambda member: member.rank)

    def of_peer(self, peer: str) -> Member | None:
        """The member with a libp2p id."""
        return next((member for member in self.all() if member.peer == peer), None)

    def shunned(self) -> list[int]:
        """The ranks of those that are there, but banned."""
        return [member.rank for member in self.all() if member.alive and self._shuns(member.peer)]

    def training(self) -> list[Member]:
        """Those that are there, train and are not banned, in order of rank."""
        return [member for member in self.all() if member.alive and member.trains and not self._shuns(member.peer)]

    def missing(self) -> list[Member]:
        """Those that have gone not too long ago; the others are forgotten."""
        now = time.monotonic()
        for member in self.all():
            if now - member.heard > REMEMBERED_SECONDS:
                del self.by_rank[member.rank]
        return [member for member in self.all() if not member.alive]

    def median_step(self, caution: float = CAUTION) -> float | None:
        """The median of the steps that training peers have reached, see `Member.step_now`; None without any."""
        steps = [member.step_now(caution) for member in self.training()]
        return statistics.median_low(steps) if steps else None

    def median_step_at_most(self) -> float:
        """The median step that training peers may have reached; infinity without any."""
        return statistics.median_high([member.step_at_most() for member in self.training()] or [math.inf])
