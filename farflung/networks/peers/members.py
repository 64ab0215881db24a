"""The members that this peer knows of: a bounded part of them all, and those that it has lost."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time

from farflung.networks.base import CORE_ONLY
from farflung.networks.peers.addresses import at_relay
from farflung.networks.peers.frames import Frame
from farflung.networks.peers.guard import Guard
from farflung.networks.peers.identity import rank_of
from farflung.networks.peers.member import ALIVE_SECONDS, CAUTION, FASTER, Member

KNOWN, LOST = 128, 256
"""Members that are there, and those that have gone, of which a peer keeps track."""
LASTS_PER_MEMBER = 1.0
"""Seconds that a member counts as there longer for each other one: the more they are, the rarer is news of each."""
AN_ADDRESS = 64
"""Members that are there at one machine's address, as they say: one who makes up many must make up machines, too."""
A_TELLER = 48
"""Members that were only heard of from one other."""
AHEAD = 1000
"""Steps that a state may be ahead of the median step."""
MAJORITY_OF = 3
"""So many claims or more are believed where most agree."""


class Members:
    """The table of all that were heard of, by rank; without this peer itself, of which `own` tells.

    Only those with whom this peer has spoken count in anything. Whom the guard bans takes part in nothing, though it is
    there; whom it shuns is nobody's partner in rounds.
    """

    def __init__(self, own: Frame, guard: Guard) -> None:
        self.by_rank: dict[int, Member] = {}
        self._own = own
        self._guard = guard
        self._stepped: float | None = None

    def hear(self, news: Member, first_hand: bool = False) -> bool:
        """Takes news of a peer, or from itself; whether they were any. Who first had a rank keeps it."""
        known = self.by_rank.get(news.rank)
        if known and (known.peer != news.peer or (news.signed_at <= known.signed_at and not first_hand)):
            return False
        if not known and not self._room_for(news, first_hand):
            return False
        again = known is not None and known.session == news.session
        news.proven = first_hand or bool(again and known and known.proven)
        news.believed = self._believed(known, news.step)
        if known and not first_hand:
            news.heard = max(news.heard, known.heard)  # nobody makes another older than it is known to be
        if known and again:
            news.step = max(news.step, known.step)  # it may have said so by the way since it wrote its record
            news.moved = known.moved if news.step == known.step else news.heard
            news.teller = known.teller
        news.lasts = ALIVE_SECONDS + LASTS_PER_MEMBER * len(self.by_rank)
        self.by_rank[news.rank] = news
        return True

    def stepped(self, rate: float) -> None:
        """Records that this peer has made a step, at so many a second.

        The time of a long round, in which it made none, does not count as time in which others did not train.
        """
        now = time.monotonic()
        paused = now - self._stepped - 2 / rate if self._stepped and rate else 0.0
        self._stepped = now
        if paused > 0:
            for member in self.all():
                member.moved = min(now, member.moved + paused)

    def heard_step(self, rank: int, step: int) -> None:
        """Records a step that a peer has mentioned."""
        if member := self.by_rank.get(rank):
            now = time.monotonic()
            if step > member.step:
                member.believed, member.believed_at = self._believed(member, step), now
                member.step, member.moved = step, now
            member.heard, member.failed = now, False

    def failed(self, rank: int) -> None:
        """Records that a peer could not be reached; it is gone until it has something newer to say.

        One that was only heard of is forgotten: it may never have been there.
        """
        member = self.by_rank.get(rank)
        if member and member.proven:
            member.failed, member.signed_at = True, max(member.signed_at, time.time())
        elif member:
            del self.by_rank[rank]

    def all(self) -> list[Member]:
        """Everyone, in order of rank; a copy, since the peers' thread may hear of others meanwhile."""
        return sorted(self.by_rank.values(), key=lambda member: member.rank)

    def of_peer(self, peer: str) -> Member | None:
        """The member with a libp2p id."""
        member = self.by_rank.get(rank_of(peer))
        return member if member and member.peer == peer else None

    def proven(self) -> list[Member]:
        """Those that are there, and have been spoken with."""
        return [member for member in self.all() if member.alive and member.proven]

    def unproven(self) -> list[Member]:
        """Those that are said to be there."""
        return [member for member in self.all() if member.alive and not member.proven]

    def shunned(self) -> list[int]:
        """The ranks of those that are there, but whose partner this peer will not be."""
        return [member.rank for member in self.proven() if self._guard.shuns(member.peer)]

    def training(self, stage: int | None = None) -> list[Member]:
        """Those that are there, train a stage and are not banned, in order of rank; unless given, what this one has."""
        stage = self._own.get("stage", 0) if stage is None else stage
        return [one for one in self.in_good_standing() if one.trains and one.stage == stage and not one.stalled]

    @property
    def core_only(self) -> bool:
        """Whether this peer holds the core of the model only."""
        return CORE_ONLY in self._own["facts"]

    def holding(self, core: bool, stage: int | None = None) -> list[Member]:
        """Those of `training` that have what one needs who holds the core only, or else all of the model."""
        return [one for one in self.training(stage) if core or CORE_ONLY not in one.facts]

    def in_good_standing(self) -> list[Member]:
        """Those that are there, have been spoken with and are not banned, in order of rank."""
        return [member for member in self.proven() if not self._guard.bans(member.peer)]

    def missing(self) -> list[Member]:
        """Those that have gone; who was only heard of is forgotten."""
        gone = [member for member in self.all() if not member.alive]
        for member in gone:
            if not member.proven:
                del self.by_rank[member.rank]
        return [member for member in gone if member.proven]

    def median_step(self, caution: float = CAUTION) -> float | None:
        """The median of the steps that training peers have reached, see `Member.step_now`; None without any."""
        training = self.training()
        if len(training) < MAJORITY_OF:
            training = [self._soberly(member) for member in training]
        steps = [member.step_now(caution) for member in training]
        return statistics.median_low(steps) if steps else None

    def median_step_at_most(self) -> float:
        """The median step that training peers may have reached; infinity without any."""
        return statistics.median_high([member.step_at_most() for member in self.training()] or [math.inf])

    def furthest_step(self) -> float:
        """The largest step that a state may be of."""
        return self.median_step_at_most() + AHEAD

    def _believed(self, known: Member | None, step: int) -> float:
        """How far a peer has come at most that says now that it is at a step, and may have been known elsewhere.

        A peer that does not train yet cannot tell, and believes it.
        """
        if not self._own["trains"] or not self._own["rate"]:
            return step
        before = min(known.believed, known.step) if known else self._own["step"]
        seconds = time.monotonic() - known.believed_at if known else 0.0
        return float(min(step, before + FASTER * self._own["rate"] * seconds))

    def _soberly(self, member: Member) -> Member:
        """A member as it can be if it is not much faster than this peer."""
        fastest = FASTER * self._own["rate"] or math.inf
        step = int(min(member.step, member.believed))
        return dataclasses.replace(member, step=step, rate=min(member.rate, fastest))

    def _room_for(self, news: Member, proven: bool) -> bool:
        """Makes room for one more, and who was only heard of goes first; whether there is some."""
        there = [member for member in self.all() if member.alive]
        rivals = [member for member in there if member.proven or not proven]  # others may have been made up
        if sum(_machine(member) == _machine(news) for member in rivals) >= AN_ADDRESS:
            return False
        if not proven and sum(member.teller == news.teller for member in self.unproven()) >= A_TELLER:
            return False
        gone = sorted(self.missing(), key=lambda member: member.heard)
        for member in gone[: max(0, len(gone) - LOST)]:
            del self.by_rank[member.rank]
        if len(there) < KNOWN:
            return True
        giving_way = self.unproven() or (self.proven() if proven else [])
        if not giving_way:
            return False
        del self.by_rank[random.choice(giving_way).rank]
        return True


def _machine(member: Member) -> str:
    """Where a member says that it is; each on this very machine counts as one for itself."""
    address = next((address for address in member.addresses if not at_relay(address)), "")
    host = "/".join(address.split("/")[:3])
    return member.peer if host in {"", "/ip4/127.0.0.1"} else host
