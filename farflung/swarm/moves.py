"""Which stage a peer serves: where a newcomer goes, and who moves when a stage holds the others up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

BYTES_A_PARAMETER = 40
"""That a stage takes: weights, their copy for microbatches under way, sum of gradients, gradients, the inner and outer
optimizers' states, anchors, and what a step makes besides (Muon's two, or a message); float32 each."""
STEADY_SECONDS, STAY_SECONDS = 120.0, 300.0
"""For so long a move must have been the best one; and so long a peer serves a stage before it moves."""
GOES_SECONDS = 20.0
"""For so long one that is to take a stage over may take to be there."""
WORTH = 0.05
"""A move must raise what the whole swarm does by this part, since the mover fetches its new stage's state first."""
SETTLED = "settled"
"""The fact of a newcomer that has chosen its stage and thinks of it no more."""

FASTER = 16.0
"""Nobody is believed to be so many times as quick as the middle one of all: who says so would have others move."""


@dataclass(frozen=True)
class Standing:
    """What is known of a peer.

    Args:
        speed: microbatches a second that it does when it always has some.
    """

    stage: int
    speed: float = 1.0


@dataclass(frozen=True)
class Move:
    """A peer that is to serve another stage."""

    peer: int
    stage: int


class MoveError(Exception):
    """This peer is to serve another stage; says why."""

    def __init__(self, stage: int, why: str) -> None:
        super().__init__(f"stage {stage} {why}")
        self.stage = stage


def standings(told: Iterable[tuple[int, int, float]]) -> dict[int, Standing]:
    """What is known of peers by their rank, stage and speed; one without a speed counts as quick as the others do.

    So does one whose speed is none: below zero, it would make its stage the neediest, and have all others move there.
    """
    known = [(rank, stage, max(0.0, speed)) for rank, stage, speed in told]
    usual = median([speed for _, _, speed in known if speed] or [1.0])
    return {rank: Standing(stage, min(speed or usual, FASTER * usual)) for rank, stage, speed in known}


def capacities(peers: Mapping[int, Standing], stages: int) -> list[float]:
    """Microbatches a second that each stage can do. The swarm does as many as the slowest one."""
    found = [0.0] * stages
    for one in peers.values():
        found[one.stage] += one.speed
    return found


def share_under_way(peers: Mapping[int, Standing], head: int, stages: int, each: float) -> int:
    """Microbatches that a head has under way: of `each` for every peer, its share by its speed among the heads.

    A quick head, whose microbatches come back no sooner than a slow one's, needs more of them to be busy. It has at
    most twice as many as where each stage has one peer, since it remembers each, and at least half as many, whatever
    speed another head may claim.
    """
    heads = sum(one.speed for one in peers.values() if one.stage == 0)
    share, usual = each * len(peers) * peers[head].speed / heads, each * stages
    return max(1, round(min(max(share, usual / 2), 2 * usual)))


def stage_for_newcomer(peers: Mapping[int, Standing], stages: int, able: Sequence[int] | None = None) -> int:
    """The stage that needs one more peer most, of those that the newcomer is able to serve; unless given, all."""
    found = capacities(peers, stages)
    return min(range(stages) if able is None else able, key=lambda stage: found[stage])


def next_move(peers: Mapping[int, Standing], stages: int, without: Collection[int] = ()) -> Move | None:
    """The move that helps most; None where none is worth it. All who know the same peers find the same move.

    Those `without` stay where they are.

    SWARM (arXiv 2301.11913) moves a peer of the stage with the shortest queues to the one with the longest. A queue is
    what remains of the difference of two stages' capacities after a while, so we compare these at once, and also see
    how far the mover's own stage would fall. No stage is left with one peer, unless another one has nobody.
    """
    found = capacities(peers, stages)
    needy = found.index(min(found))
    helped = found[needy] * (1 + WORTH)
    if (found[needy] + max(found)) / 2 <= helped:
        return None
    counts = Counter(one.stage for one in peers.values())
    least = 2 if counts[needy] else 1
    movable = [(peer, one) for peer, one in sorted(peers.items(), reverse=True) if peer not in without]
    alike = {(one.stage, one.speed): peer for peer, one in movable}
    best = None
    for (stage, speed), peer in sorted(alike.items()):
        after = min(found[stage] - speed, found[needy] + speed)
        if stage != needy and counts[stage] > least and after > helped:
            best, helped = Move(peer, needy), after
    return best


class Successors:
    """Who is to take over a stage that nobody serves: the best mover, and where it does not go, the next best.

    It may lack the memory, or hang. While one that was to go is gone, it is on its way, and nobody else goes.
    """

    def __init__(self) -> None:
        self._due: Move | None = None
        self._since = 0.0
        self._passed: set[int] = set()

    def move(self, peers: Mapping[int, Standing], stages: int, now: float) -> Move | None:
        """The move that is due at so many seconds, by what is known of all peers."""
        late = now >= self._since + GOES_SECONDS
        if self._due and self._due.peer not in peers and not late:
            return None
        if self._due and late:
            self._passed.add(self._due.peer)
        move = next_move(peers, stages, self._passed)
        if move is None:
            self._passed.clear()
        if move != self._due:
            self._due, self._since = move, now
        return move

    def clear(self) -> None:
        """All stages have somebody."""
        self._due = None
        self._passed.clear()


class Restlessness:
    """Whether one peer moves while all stages have peers.

    A move must have been the best one for a while, whatever speeds are measured meanwhile; and who has just begun to
    serve a stage stays for longer, since each move costs a download and what the mover has learnt since its last round.

    Args:
        began: seconds, when it began to serve its stage.
    """

    def __init__(self, rank: int, stages: int, began: float) -> None:
        self._rank, self._stages, self._began = rank, stages, began
        self._best: tuple[int, int] | None = None
        """From which stage to which the best move goes: of peers that are alike, now one is quicker, now the other."""
        self._since = began

    def stage(self, peers: Mapping[int, Standing], now: float) -> int | None:
        """The stage to move to now, if any, by what is known of all peers at so many seconds."""
        move = next_move(peers, self._stages)
        best = (peers[move.peer].stage, move.stage) if move else None
        if best != self._best:
            self._best, self._since = best, now
        steady = now - self._since >= STEADY_SECONDS and now - self._began >= STAY_SECONDS
        return move.stage if move and move.peer == self._rank and steady else None
