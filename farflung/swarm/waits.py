"""How long a peer waits for others: what follows from the time that they have taken lately."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from statistics import median_low
from typing import Any, TypeVar

K = TypeVar("K")

LEAST_SECONDS, LATE = 20.0, 4.0
"""Nobody is late before so many seconds; and who takes so many times as long as is usual has as many more."""
LEFT_OUT, LONGEST_OUT_SECONDS = 10.0, 600.0
"""Who did not deliver is left out for so many times as long as it was waited for; and for so many seconds at most."""
MOST_DOUBLED = 10
"""Times that a wait is doubled."""
LATELY, PEERS = 32, 128
"""Answers of each peer that are remembered, and peers."""


class Waits:
    """How long each of some peers is waited for, and who is left out for a while since it did not deliver.

    What is usual is the longest that the middle one of them has taken lately, so that one alone cannot have others
    waited for; and no peer is late that takes as long as it did itself. One that does not deliver is left out for a
    while, and waited for twice as long the next time. A value without a clock.

    Args:
        longest_s: seconds that nobody is waited for longer; all are waited for so long until one has delivered.
    """

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._took: dict[int, deque[float]] = {}
        self._failed: Counter[int] = Counter()
        self._out_until: dict[int, float] = {}

    def seconds(self, peer: int) -> float:
        """How long a peer is waited for."""
        if not self._took:
            return self.longest_s
        usual = median_low(max(one) for one in self._took.values())
        own = max(self._took.get(peer, (0.0,)))
        return float(min(self.longest_s, (LEAST_SECONDS + LATE * max(usual, own)) * self._times(peer)))

    def took(self, peer: int, seconds: float) -> None:
        """A peer has delivered."""
        lately = self._took.pop(peer, None) or deque(maxlen=LATELY)
        lately.append(seconds)
        self._took[peer] = lately
        if len(self._took) > PEERS:
            del self._took[next(iter(self._took))]
        self._failed.pop(peer, None)
        self._out_until.pop(peer, None)

    def failed(self, peer: int, seconds: float, now: float) -> None:
        """A peer was waited for so long, up to now, and has not delivered."""
        if peer in self.left_out(now):
            return  # what else it was waited for at the same time
        out = min(LEFT_OUT * seconds * self._times(peer), LONGEST_OUT_SECONDS)
        self._failed[peer] += 1
        if len(self._failed) > PEERS:
            del self._failed[next(iter(self._failed))]
        self._out_until = {one: until for one, until in self._out_until.items() if until > now} | {peer: now + out}

    def left_out(self, now: float) -> set[int]:
        """Those who are left out now."""
        return {peer for peer, until in self._out_until.items() if until > now}

    def _times(self, peer: int) -> float:
        return 2.0 ** min(self._failed[peer], MOST_DOUBLED)


async def without_late(asked: Mapping[K, asyncio.Future[Any]], allowed: Callable[[K, float], float]) -> None:
    """Waits for what was asked of some at the same time, and cancels what is late.

    That is known from the seconds in which half of them have answered: `allowed` says how many one has then.
    """
    now = asyncio.get_running_loop().time
    began, half, left = now(), math.inf, dict(asked)
    while left:
        if 2 * len(left) <= len(asked):
            half = min(half, now() - began)
        ends = {one: began + allowed(one, half) for one in left}
        for one in [one for one, end in ends.items() if end <= now()]:
            left.pop(one).cancel()
        if left:
            soonest = min(ends[one] for one in left) - now()
            timeout = None if math.isinf(soonest) else soonest
            await asyncio.wait(left.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            left = {one: answer for one, answer in left.items() if not answer.done()}
