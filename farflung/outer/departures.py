"""Who has ended its rounds while others go on, as with less data than these have: nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from farflung.networks import Group, Network, PeerLostError, Pending

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""How often the words of those who have ended are looked for in a wait."""
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two looks at whether an exchange has ended: ever longer."""


class Departures:
    """The replicas that have left a session's rounds, and the first round of each fragment that each has left out.

    Args:
        network: of the replicas; where they cannot leave each other words, all are waited for.
        topic: the session's name, the same on all of them.
    """

    def __init__(self, network: Network, topic: str) -> None:
        self._network = network
        self._topic = f"rounds of {topic}"
        self._next: dict[int, list[int]] = {}

    def leave(self, next_rounds: Sequence[int]) -> None:
        """Says that this replica takes no part from these rounds on, of each fragment."""
        if self._network.board:
            self._network.board.leave(self._topic, next_rounds)

    def without(self, members: Group, fragment: int, round: int) -> Group:
        """The members but for those that have missed an earlier round, of which all others have learnt in that."""
        return tuple(rank for rank in members if rank not in self._next or self._next[rank][fragment] >= round)

    def wait(self, pending: Pending[T], group: Group, fragment: int, round: int, seconds: float) -> T:
        """The result of a round's exchange in a group. Raises PeerLostError, at once where somebody has left before."""
        network, began, pause = self._network, self._network.now(), FIRST_PAUSE
        if network.board is None:
            return pending.wait(seconds)
        gone, look_at = self._known_gone(group, fragment, round), began + LOOK_SECONDS
        while not (pending.done() or gone) and network.now() < began + seconds:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if network.now() >= look_at:
                gone, look_at = self._gone(group, fragment, round), network.now() + LOOK_SECONDS
        network.traffic.seconds_blocked += network.now() - began
        try:
            return pending.wait(0.0 if gone else max(0.0, began + seconds - network.now()))
        except PeerLostError as lost:
            if gone := gone or self._gone(group, fragment, round):
                named = ", ".join(map(str, gone))
                raise PeerLostError(gone, f"replica {named} has ended its rounds", lost.delivered) from lost
            raise

    def _gone(self, group: Group, fragment: int, round: int) -> list[int]:
        """The members of a group that have left before a round."""
        if self._network.board:
            self._next |= self._network.board.words(self._topic)
        return self._known_gone(group, fragment, round)

    def _known_gone(self, group: Group, fragment: int, round: int) -> list[int]:
        return [rank for rank in group if rank in self._next and self._next[rank][fragment] <= round]
