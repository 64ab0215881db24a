"""A swarm's peers come and go for days: how much of what they could do is done, in virtual time and without tensors."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from enum import Enum, auto

from farflung.swarm.moves import Standing, next_move, stage_for_newcomer


@dataclass(frozen=True)
class Lives:
    """How peers come and go.

    Args:
        up_s, down_s: mean seconds that a peer lives, and is gone; both exponential.
        fetch_s: seconds until a peer has the state of a stage.
        moves_every_s: seconds between two looks whether a move is worth it; None for no moves, 0 for a look whenever
            somebody came or went.
        notice_s: seconds until the others know that somebody is gone.
    """

    peers: int
    stages: int
    up_s: float = 2 * 3600.0
    down_s: float = 0.5 * 3600.0
    fetch_s: float = 30.0
    moves_every_s: float | None = 300.0
    notice_s: float = 15.0


class _Event(Enum):
    DIES = auto()
    COMES = auto()
    SERVES = auto()
    LOOK = auto()


@dataclass
class _Swarm:
    lives: Lives
    chance: random.Random
    serving: dict[int, Standing] = field(default_factory=dict)
    fetching: dict[int, Standing] = field(default_factory=dict)
    events: list[tuple[float, int, _Event, int]] = field(default_factory=list)
    number: int = 0
    counts: list[int] = field(default_factory=list)
    """Peers that serve each stage: the mapping is too large to be gone through at each event."""

    def serve(self, peer: int, standing: Standing) -> None:
        self.serving[peer] = standing
        self.counts[standing.stage] += 1

    def leave(self, peer: int) -> bool:
        """Whether it served."""
        standing = self.serving.pop(peer, None)
        if standing is not None:
            self.counts[standing.stage] -= 1
        return standing is not None

    def at(self, seconds: float, event: _Event, peer: int = -1) -> None:
        self.number += 1
        heapq.heappush(self.events, (seconds, self.number, event, peer))

    def later(self, now: float, mean: float) -> float:
        return now + self.chance.expovariate(1 / mean)

    def handle(self, now: float, event: _Event, peer: int) -> None:
        if event is _Event.DIES:
            self.leave(peer)
            self.fetching.pop(peer, None)
            self.at(self.later(now, self.lives.down_s), _Event.COMES, peer)
            self.changed(now + self.lives.notice_s)
        elif event is _Event.COMES:
            stage = stage_for_newcomer(self.serving | self.fetching, self.lives.stages)
            self.fetch(now, peer, stage)
            self.at(self.later(now, self.lives.up_s), _Event.DIES, peer)
        elif event is _Event.SERVES:
            if peer in self.fetching:
                self.serve(peer, self.fetching.pop(peer))
                self.changed(now)
        else:
            self.look(now)

    def changed(self, when: float) -> None:
        if self.lives.moves_every_s == 0:
            self.at(when, _Event.LOOK)

    def fetch(self, now: float, peer: int, stage: int) -> None:
        self.fetching[peer] = Standing(stage)
        self.at(now + self.lives.fetch_s, _Event.SERVES, peer)

    def look(self, now: float) -> None:
        if self.lives.moves_every_s:
            self.at(now + self.lives.moves_every_s, _Event.LOOK)
        while (move := next_move(self.serving | self.fetching, self.lives.stages)) is not None:
            if not self.leave(move.peer):
                return  # it is on its way to another stage, and is moved on once it serves that
            self.fetch(now, move.peer, move.stage)


def share_of_optimal(lives: Lives, hours: float, seed: int) -> float:
    """What a swarm of equal peers does, beside what the best places of the peers that live would let it do."""
    swarm = _Swarm(lives, random.Random(seed), counts=[0] * lives.stages)
    living = lives.up_s / (lives.up_s + lives.down_s)
    for peer in range(lives.peers):
        if swarm.chance.random() < living:
            swarm.serve(peer, Standing(peer % lives.stages))
            swarm.at(swarm.later(0.0, lives.up_s), _Event.DIES, peer)
        else:
            swarm.at(swarm.later(0.0, lives.down_s), _Event.COMES, peer)
    if lives.moves_every_s:
        swarm.at(lives.moves_every_s, _Event.LOOK)
    done = possible = last = 0.0
    while last < hours * 3600:
        now, _, event, peer = heapq.heappop(swarm.events)
        now = min(now, hours * 3600)
        done += (now - last) * min(swarm.counts)
        possible += (now - last) * ((len(swarm.serving) + len(swarm.fetching)) // lives.stages)
        swarm.handle(now, event, peer)
        last = now
    return done / possible
