"""How fast this peer trains, the step that it counts, and how long it waits for others."""

from __future__ import annotations

import math
import time

from farflung.networks.peers.members import Members

JUMP = 4
"""A peer that is so many steps behind the median step skips to it."""
MEMORY_SECONDS = 10.0
"""Steps over which a peer's speed is averaged."""


WAITED_SHARE = 0.25
"""The part of the time between two rounds for which a peer waits for others."""
FIRST_ROUND_SECONDS = 20.0
"""How long the first round is expected to take."""


class Patience:
    """How long a peer waits for others at a round: a share of the time since the last, and so many seconds at most."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._met: dict[str, float] = {}

    def seconds(self, key: str) -> float:
        """How long to wait at a round that begins now, by the time since the last of its fragment."""
        fragment, now = key.rpartition(" of ")[2], time.monotonic()
        between = now - self._met.get(fragment, now - FIRST_ROUND_SECONDS)
        self._met[fragment] = now
        return min(max(1.0, WAITED_SHARE * between), self._longest_s)


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
