"""Who has ended its rounds while others go on, as with less data than these have: nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from farflung.networks import Group, Network, PeerLostError
from farflung.networks.transfer import GONE

LOOK_SECONDS = 1.0
"""How often the words of those who have ended are looked for in a wait."""
LAST_LOOK_SECONDS = 5.0
"""So long a lost round waits for the words, so that all of its members know the same."""


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

    def gone(self, group: Group, fragment: int, round: int) -> Group:
        """The members of a group that are known to have left before a round."""
        return tuple(rank for rank in group if rank in self._next and self._next[rank][fragment] <= round)

    @contextmanager
    def watched(self, group: Group, fragment: int, round: int) -> Iterator[None]:
        """A context in which waits for a round's exchange end, with PeerLostError, when a member is known to have left.

        The error names those who have.
        """
        board, now = self._network.board, self._network.now
        if board is None:
            yield
            return
        look_at = now() + LOOK_SECONDS

        def gone() -> bool:
            nonlocal look_at
            if now() >= look_at:
                look_at = now() + LOOK_SECONDS
                self._next |= board.words(self._topic)
            return bool(self.gone(group, fragment, round))

        token = GONE.set(gone)
        try:
            yield
        except PeerLostError as lost:
            self._next |= board.words(self._topic, LAST_LOOK_SECONDS)
            if left := self.gone(group, fragment, round):
                raise PeerLostError(left, has_left(left), lost.delivered) from lost
            raise
        finally:
            GONE.reset(token)


def has_left(ranks: Group) -> str:
    """Says that replicas have ended their rounds."""
    return f"replica {', '.join(map(str, ranks))} has ended its rounds"
