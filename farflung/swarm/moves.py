"""Which stage a peer serves: where a newcomer goes, and who moves when a stage holds the others up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BYTES_A_PARAMETER = 32
"""That a stage keeps: weights, their copy for microbatches under way, sum of gradients, gradients, the inner and outer
optimizers' states and anchors; float32 each."""
WORTH = 0.05
"""A move must raise what the whole swarm does by this part, since the mover fetches its new stage's state first."""


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
    """This peer is to serve another stage."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage} has nobody")
        self.stage = stage


def capacities(peers: Mapping[int, Standing], stages: int) -> list[float]:
    """Microbatches a second that each stage can do. The swarm does as many as the slowest one."""
    found = [0.0] * stages
    for one in peers.values():
        found[one.stage] += one.speed
    return found


def stage_for_newcomer(peers: Mapping[int, Standing], stages: int, able: Sequence[int] | None = None) -> int:
    """The stage that needs one more peer most, of those that the newcomer is able to serve; unless given, all."""
    found = capacities(peers, stages)
    return min(range(stages) if able is None else able, key=lambda stage: found[stage])


def next_move(peers: Mapping[int, Standing], stages: int) -> Move | None:
    """The move that helps most; None where none is worth it. All who know the same peers find the same move.

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
    alike = {(one.stage, one.speed): peer for peer, one in sorted(peers.items(), reverse=True)}
    best = None
    for (stage, speed), peer in sorted(alike.items()):
        after = min(found[stage] - speed, found[needy] + speed)
        if stage != needy and counts[stage] > least and after > helped:
            best, helped = Move(peer, needy), after
    return best
