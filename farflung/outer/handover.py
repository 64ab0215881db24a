"""When a replica gives its state, and for which of the rounds to come a state that was given holds.

A round's landing makes new anchors. Where only replicas with the same anchors may average, what one has between a
round's start and its landing is of no use to another: no further round starts with it.
"""

from __future__ import annotations

from torch import Tensor

from farflung.outer.exchange import Exchange
from farflung.outer.round import Rounds, Sync

APART = 4
"""Steps by which replicas that train together may count apart."""
COMES_S = 2.0
"""How long one that is behind waits for a state at a round's start: those it has asked may be at their own waits."""
HELD_S = 7.0
"""Longest time for which one that asks is kept waiting: it waits little longer for the last of three answers than for
the first, and would else hear one alone, which may lie."""


class Handover:
    """What one replica does about states. Where anchors need not be `equal`, all hold at any time."""

    def __init__(self, rounds: Rounds[Tensor, Exchange], equal: bool) -> None:
        self._rounds = rounds
        self._equal = equal
        self._asked_at: float | None = None
        self.lacking: set[int] = set()
        """Fragments for which the last state did not hold, though they were wanted."""
        self._lacks_since = 0
        self._has_asked_again = False
        """Whether another was asked for, for that, since the last round landed."""

    def due(self, wanted: bool, step: int, now: float) -> bool:
        """Whether a state that is `wanted` is to be given before the rounds of a step, or when it holds for longer."""
        syncs = self._rounds.syncs
        holds = not self._rounds.pending and not any(sync.starts_at(step) for sync in syncs)
        pauses = all(len(syncs) * (sync.delay_steps + 1) < sync.every_steps for sync in syncs)
        if not wanted or not self._equal or holds or not pauses:
            self._asked_at = None
            return wanted
        self._asked_at = now if self._asked_at is None else self._asked_at
        return now - self._asked_at > HELD_S

    def counting(self, wanted: list[Sync[Tensor]], told: int, step: int, has_none: bool) -> list[Sync[Tensor]]:
        """Of the fragments `wanted`, those that others' state as of the step `told` counts for.

        That is if their last round had landed then: while a state comes, rounds of other fragments land, and what was
        right of these would be lost. All, for a replica that `has_none` of its own.
        """
        hold = [sync for sync in wanted if not self._equal or sync.holds_from(max(told, step), told)]
        self.lacking = {sync.index for sync in wanted if sync not in hold}
        self._lacks_since = max(told, step)
        return wanted if has_none else hold

    def asks_again(self, step: int) -> bool:
        """Whether to ask for another state, when those who give it may have landed what they had under way.

        A replica does so once a round at most: they may lie.
        """
        if self._has_asked_again or not self.lacking or step < self._lacks_since + APART:
            return False
        self._has_asked_again = True
        return True

    def landed(self, fragment: int, averaged: bool) -> None:
        """Takes note of a round's landing."""
        self._has_asked_again = False
        if averaged:
            self.lacking.discard(fragment)
