"""Whose turn it is to lead the steps that all peers of a swarm take together."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from farflung.swarm.waits import LATE

QUIET_SECONDS = 60.0
"""No leader is passed by before so many seconds without a step."""
LATELY = 32
"""Steps of which it is remembered how long they took."""


class Turns:
    """The head of the lowest rank leads, but for those under whom no step was taken for too long.

    That is so many times as long as a step took lately, so that a leader which orders nothing stops a run for a minute
    and not for ever. It is judged alike by all heads, also by the one that leads: so two hardly ever lead at once. When
    all were passed by, each has another chance, for twice as long. A value without a clock.

    Args:
        first_s: seconds that a step may take while none has been seen.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._took: deque[float] = deque(maxlen=LATELY)
        self._passed: set[int] = set()
        self._reached, self._since, self._chances = -1, 0.0, 1

    def leader(self, heads: Collection[int], reached: int, now: float) -> int:
        """Which of the heads leads, where the swarm has reached a step; there must be one."""
        if reached > self._reached:
            if self._reached >= 0:
                self._took.append(now - self._since)
            self._reached, self._since, self._chances = reached, now, 1
        elif now > self._since + self._allowed():
            self._passed.add(self._first(heads))
            self._since = now
        return self._first(heads)

    def _first(self, heads: Collection[int]) -> int:
        if self._passed.issuperset(heads):
            self._passed.clear()
            self._chances *= 2
        return min(one for one in heads if one not in self._passed)

    def _allowed(self) -> float:
        longest = LATE * max(self._took) if self._took else self._first_s
        return self._chances * max(QUIET_SECONDS, longest)
