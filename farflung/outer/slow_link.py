"""A replica whose link is much slower than the others' comes to fewer rounds: its partners wait for it in each."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from farflung.outer.outcomes import Outcome, Round

LAST = 5
"""Rounds by which it is told how long one lasts."""
FEWEST = 2
"""Others that must have told how long theirs last."""
SLOWER = 2.0
"""A replica is slow whose rounds hold it up more than so many times as long as the others are held up by theirs."""
SHARE = 0.2
"""The part of the time between two rounds for which one may hold up a partner, on average over all rounds."""
SELDOM = 8
"""It comes to one in so many rounds at least: they show whether its link is as fast again, and others may lie."""


class SlowLink:
    """How long rounds hold up a replica, beside the others, and in which of them it therefore takes no part."""

    def __init__(self) -> None:
        self._held_up: deque[float] = deque(maxlen=LAST)
        self._trained: deque[float] = deque(maxlen=LAST)
        self._landed: float | None = None
        self._asked: dict[int, tuple[str, int]] = {}
        """The latest round of each fragment that was asked for, and in how many before it this replica stayed out."""

    @property
    def held_up_s(self) -> float | None:
        """For how long rounds hold up this replica, in seconds; None while that is unknown."""
        return statistics.median(self._held_up) if len(self._held_up) == LAST else None

    def landed(self, round: Round) -> None:
        """Takes note of a round."""
        if self._landed is not None:
            self._trained.append(round.waited_from - self._landed)
        self._landed = round.landed
        if round.outcome == Outcome.AVERAGED:
            self._held_up.append(round.landed - round.waited_from)

    def stays_out(self, fragment: int, label: str, others_s: Sequence[float]) -> bool:
        """Whether this replica takes no part in a fragment's round; others have told for how long theirs hold them up.

        The answer for a round stays the same, however often it is asked for.
        """
        asked, stayed_out = self._asked.get(fragment, ("", 0))
        if label != asked:
            stayed_out = (stayed_out + 1) % self._comes_to_one_in(others_s)
            self._asked[fragment] = label, stayed_out
        return stayed_out > 0

    def _comes_to_one_in(self, others_s: Sequence[float]) -> int:
        if self.held_up_s is None or len(others_s) < FEWEST:
            return 1
        usual = statistics.median_high(others_s)
        if self.held_up_s <= SLOWER * usual:
            return 1
        return min(SELDOM, 1 + int((self.held_up_s - usual) / (SHARE * max(statistics.median(self._trained), 1e-3))))
