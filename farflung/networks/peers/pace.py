"""How fast this peer trains, the step that it counts, and how long it waits for others."""

from __future__ import annotations

import math
import time

from farflung.networks.base import BESIDE, Group, Party
from farflung.networks.peers.members import Members

JUMP = 4
"""A peer that is so many steps behind the median step skips to it."""
MEMORY_SECONDS = 10.0
"""Steps over which a peer's speed is averaged."""


WAITED_SHARE = 0.25
"""The part of the time between two rounds for which a peer waits for others."""
OUT_OF_STEP = 2
"""One that has met nobody at so many rounds waits for all of that time: all who hold the same rounds then come by."""
FIRST_ROUND_SECONDS = 20.0
"""How long the first round is expected to take."""
BESIDE_SECONDS = 5.0
"""For so long at least a peer waits for those that it has just met."""


class Patience:
    """How long a peer waits for others at a round: a share of the time since the last, and so many seconds at most.

    Peers that wait for a share only, and are further apart than that, would stay so: each leaves before the next comes.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._met: dict[str, float] = {}
        self._in_vain = 0

    def seconds(self, key: str) -> float:
        """How long to wait at a round that begins now, by the time since the last of its fragment.

        Those who have just met come to what is beside their round, be it later on a busy machine.
        """
        fragment, now = key.rpartition(" of ")[2], time.monotonic()
        between = now - self._met.get(fragment, now - FIRST_ROUND_SECONDS)
        self._met[fragment] = now
        if BESIDE in key:
            return min(max(BESIDE_SECONDS, between), self._longest_s)
        share = WAITED_SHARE if self._in_vain < OUT_OF_STEP else 1.0
        return min(max(1.0, share * between), self._longest_s)

    def ended(self, party: Party, wanted: Group = ()) -> None:
        """Takes note of what a round came to for those `wanted`: whether others were there when this peer was."""
        if len(wanted) == 1:  # it was to meet nobody
            return
        met = len(party.group) > 1 or party.behind or party.alone != "nobody"  # a host tells of a group of one
        self._in_vain = 0 if met else self._in_vain + 1


class Pace:
    """The time that a step takes, on the average of the last ones."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._steps = 0
        self._seconds = 0.0

    @property
    def begins(self) -> bool:
        """Whether no step has ended yet."""
        return self._last is None

    def step(self, now: float) -> float:
        """Takes note of the end of a step; steps a second, 0 while that is unknown."""
        if self._last is not None:
            self._steps += 1
            seconds = max(now - self._last, 1e-6)
            self._seconds += max(1 / self._steps, min(0.1, seconds / MEMORY_SECONDS)) * (seconds - self._seconds)
        self._last = now
        return 1 / self._seconds if self._seconds else 0.0


def counted_step(step: int, every: int, members: Members, begins: bool) -> int:
    """The step that a peer counts itself at, after its own `step`, with rounds each `every` steps.

    Who is behind goes on from where the others are; who is more than a round ahead does not go on counting. One that
    `begins` goes to the step that they are likely at, since all wait in the next round for one that is a little late.
    """
    median = members.median_step()
    if median is None:
        return step
    if begins:
        return max(step, math.ceil(members.median_step(caution=1.0) or 0.0))
    if median - step >= JUMP:
        return int(median)
    return step - 1 if step - 1 > members.median_step_at_most() + every else step
