"""Who comes to a round no more: it has ended its rounds while others go on, or held this one apart from them.

Nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from farflung.networks import Group, Network, PeerLostError
from farflung.networks.base import told_fates
from farflung.networks.transfer import GONE

LOOK_SECONDS = 1.0
"""How often the words of those who have ended are looked for in a wait."""
LAST_LOOK_SECONDS = 5.0
"""So long a lost round waits for the words, so that all of its members know the same."""


Place = tuple[int, Group]
"""The first round that a replica can still come to, and with whom it has come to that one: nobody before it has."""


def those_who_come(members: Group, round: int, own: int, at: Mapping[int, Place]) -> Group:
    """The members that one may meet in a round, by the places of those that are known; the members themselves if all.

    Where some of them wait already, in groups that it is in, it is the same one of these for all.
    """
    places = [at[rank] for rank in members if rank in at]
    groups = {id(group): group for first, group in places if first == round and group}  # each of many is looked at once
    apart = {number for number, group in groups.items() if own not in group}
    if joined := [group for n, group in groups.items() if n not in apart and {*group} <= {*members}]:
        return max(joined, key=lambda group: (len(group), group))
    nowhere: Place = (round, ())
    coming = tuple(
        rank
        for rank in members
        for first, group in [at.get(rank, nowhere)]
        if first < round or (first == round and id(group) not in apart)
    )
    return coming if len(coming) < len(members) else members


class Word(NamedTuple):
    """What a replica says of a session's rounds.

    Args:
        at: its place in each series.
        ends: the first round of each fragment that it cannot come to, since it ends.
    """

    at: Mapping[str, Place]
    ends: Sequence[int] | None

    def comes(self, series: str, round: int, rank: int) -> bool:
        """Whether it can still come to a round in which another replica is."""
        first, group = self.at.get(series, (round, ()))
        return first < round or (first == round and (rank in group or not group))


class Departures:
    """The replicas that have left a session's rounds, and those that hold them apart while they cannot reach others.

    A series is a fragment's rounds, or what is exchanged after each of them: `beside` says what that is.

    Args:
        network: of the replicas; where they cannot leave each other words, all are waited for.
        topic: the session's name, the same on all of them.
    """

    def __init__(self, network: Network, topic: str) -> None:
        self._network = network
        self._topic = f"rounds of {topic}"
        self._at: dict[str, Place] = {}
        self._words: dict[int, Word] = {}

    def comes(self, fragment: int, round: int, group: Group, beside: str = "") -> None:
        """Says with whom this replica comes to a round, where that is told."""
        if (board := self._network.board) and board.tells_of_rounds:
            self._at = {**self._at, _series(fragment, beside): (round, group)}
            board.leave(self._topic, Word(self._at, None))

    def passes(self, fragment: int, round: int, beside: str = "") -> None:
        """Says that this replica has ended a round, where that is told."""
        self.comes(fragment, round + 1, (), beside)

    def leave(self, next_rounds: Sequence[int]) -> None:
        """Says that this replica takes no part from these rounds on, of each fragment."""
        if self._network.board:
            self._network.board.leave(self._topic, Word(self._at, next_rounds))

    def without(self, members: Group, fragment: int, round: int, beside: str = "") -> Group:
        """The members but for those of whom all others have learnt that they do not come: see those_who_come."""
        self._look_if_free()
        series = _series(fragment, beside)
        at = {rank: word.at[series] for rank, word in self._words.items() if series in word.at}
        return self.staying(those_who_come(members, round, self._network.rank, at), fragment, round)

    def staying(self, members: Group, fragment: int, round: int) -> Group:
        """The members but for those of whom all others have learnt that they have ended before a round."""
        self._look_if_free()
        left = self._left(members, fragment, round - 1)
        return tuple(rank for rank in members if rank not in left)

    def check(self, group: Group, fragment: int, round: int) -> None:
        """Raises PeerLostError for members of a group that are known not to come to a round."""
        self._look_if_free()
        if fates := self._fates(group, fragment, round):
            raise PeerLostError(sorted(fates), told_fates(fates))

    @contextmanager
    def watched(self, group: Group, fragment: int, round: int, beside: str = "") -> Iterator[None]:
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
            if board.at_once or now() >= look_at:
                look_at = now() + LOOK_SECONDS
                self._look()
            return bool(self._fates(group, fragment, round, beside))

        token = GONE.set(gone)
        try:
            yield
        except PeerLostError as lost:
            self._look(LAST_LOOK_SECONDS)
            if fates := self._fates(group, fragment, round, beside):
                raise PeerLostError(sorted(fates), told_fates(fates), lost.delivered) from lost
            raise
        finally:
            GONE.reset(token)

    def _look_if_free(self) -> None:
        if self._network.board and self._network.board.at_once:
            self._look()

    def _look(self, seconds: float = 0.0) -> None:
        if board := self._network.board:
            self._words |= {rank: Word(*word) for rank, word in board.words(self._topic, seconds).items()}

    def _left(self, group: Group, fragment: int, round: int) -> Group:
        """Those who have ended their rounds before one."""
        ends = {rank: word.ends for rank, word in self._words.items() if word.ends is not None}
        return tuple(rank for rank in group if rank in ends and ends[rank][fragment] <= round)

    def _ahead(self, group: Group, series: str, round: int) -> Group:
        """Those who have held a round without this replica, or are holding it."""
        own = self._network.rank
        return tuple(r for r in group if r in self._words and not self._words[r].comes(series, round, own))

    def _fates(self, group: Group, fragment: int, round: int, beside: str = "") -> dict[int, str]:
        ahead = dict.fromkeys(self._ahead(group, _series(fragment, beside), round), "has held this round apart")
        return ahead | dict.fromkeys(self._left(group, fragment, round), "has ended its rounds")


def _series(fragment: int, beside: str) -> str:
    return f"{fragment} {beside}"
