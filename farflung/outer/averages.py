"""What replicas average outside of rounds: buffers and weights, on demand and at the end; who is lost is left out."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from farflung.errors import UserError
from farflung.hooks.buffers import average, real_view
from farflung.hooks.shards import own_of, reshard
from farflung.networks import Agree, Group, PeerLostError, among_replicas_left
from farflung.networks.base import seats_of
from farflung.networks.torchrun import log
from farflung.networks.transfer import GONE
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.schedules import Schedule

if TYPE_CHECKING:
    from farflung.outer.session import Session

T = TypeVar("T")
Work = Callable[[str, Group, float], Callable[[], None]]
"""Averages among a group, under a key, within seconds; what it returns then writes the mean."""

END_DEADLINES = 10
"""The end waits this many times the deadline: replicas that never met may be far apart in time."""
AT_END = " at the end"
"""Marks what is averaged by those who train no more."""
PATIENCE_SECONDS = 30.0
"""After so long a wait for the others it is told."""
WAITS = (
    "replica {} waits for the others, to average {}; every replica must call averaged_weights(), average_buffers() and "
    "finish() alike, and those that do not come within {:g} s are left out"
)


class Averages:
    """Averages a session's replicas on demand; all of them must call alike. Who comes and goes has nobody to end with.

    Replicas that are lost are left out. Its methods raise PeerLostError where the rest cannot be reached, and UserError
    where sizes differ.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0
        self._everyone = seats_of(session.network)
        self._told_lost: Group = ()
        self.shared_by = self._everyone
        """Whose weights were averaged last."""
        self.settle: Callable[[Group], object] = lambda group: None
        """Is called with those whose weights are to be averaged, before they are; again, where there are fewer."""

    def buffers(self, at_end: bool = False) -> None:
        """Gives all replicas the mean of their buffers, and of frozen weights that the loop moves."""
        session = self._session
        if session.network.elastic:
            return
        session.meet_islands()
        if session.trained.layout.total(torch.tensor([len(session.averaged_besides())], dtype=torch.float64)):
            self._average("buffers", at_end)

    def buffers_after(self, round: int, result: Result) -> None:
        """Gives those of a round the mean of their buffers; notes whom that has lost."""
        session, key = self._session, self._session.key(f"buffers of round {round}")
        try:
            with session.departures.watched(result.group, 0, round):
                average(
                    session.averaged_besides(), session.network, result.group, key, session.deadline_s, directions=True
                )
        except PeerLostError as lost:
            result.note(Outcome.PEER_LOST, str(lost))

    def weights(self, at_end: bool = False) -> None:
        """Gives all replicas the mean of their weights."""
        session = self._session
        if session.network.elastic:
            return
        reshard(session.trained.model)
        session.meet_islands()
        self._average("weights", at_end)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """See Session.averaged_weights."""
        if self._session.network.elastic:
            raise UserError(
                "peers on the internet come and go, so nobody has the mean of all; evaluate this replica's own weights"
            )
        with self._put_back():
            with torch.no_grad():
                self.weights()
                self.buffers()
            yield

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """A context at whose end weights and buffers are what they were."""
        session = self._session
        reshard(session.trained.model)
        shown = [*session.trained.parameters, *session.averaged_besides().values()]
        with torch.no_grad():
            kept = [own_of(tensor.detach()).clone() for tensor in shown]
        try:
            yield
        finally:
            reshard(session.trained.model)
            with torch.no_grad():
                for tensor, own in zip(shown, kept, strict=True):
                    own_of(tensor.detach()).copy_(own)

    def _average(self, what: str, at_end: bool) -> None:
        """Averages these; who has ended helps before that with what those ask for who still train."""
        own = f"{what}{AT_END}" if at_end else what
        while self._held(own) != own:
            pass

    def _held(self, own: str) -> str:
        """Holds the next average of those that all replicas hold, and returns of what it was."""
        self._count += 1
        key, seconds = self._session.key(f"average {self._count}"), END_DEADLINES * self._session.deadline_s
        asked = own
        work: Work = self._of_weights
        with ExitStack() as helping, told_of_waiting(self._session.network.rank, own, seconds):

            def hear(words: Set[str]) -> None:
                nonlocal asked, work
                if (asked := asked_for(words)) != own:
                    helping.enter_context(self._put_back())
                work = self._of_weights if asked.startswith("weights") else self._of_buffers()

            write = self._among_those_left(lambda group: work(key, group, seconds), key, seconds, Agree(own, hear))
            write()
        return asked

    def _of_buffers(self) -> Work:
        session, tensors = self._session, self._session.averaged_besides()
        before = {name: real_view(tensor).clone() for name, tensor in tensors.items()}

        def work(key: str, group: Group, seconds: float) -> Callable[[], None]:
            for name, values in before.items():
                if not (view := real_view(tensors[name])).equal(values):  # somebody was lost on the way
                    view.copy_(values)
            average(tensors, session.network, group, f"{key} of {group}", seconds, directions=True)
            return lambda: None

        return work

    def _of_weights(self, key: str, group: Group, seconds: float) -> Callable[[], None]:
        session = self._session
        self.settle(group)
        fragments = session.holders.fragments(session.trained.model, 1, session.trained.named)
        messages = [fragment.message(fragment.read()) for fragment in fragments]
        for members, cells in session.holders.apart(messages, Schedule(), group).items():
            for column in session.columns.of(members, list(cells)):
                named = {f"{cell} {n}": one for cell in column.cells for n, one in enumerate(cells[cell])}
                average(named, column.network, members, column.key(f"{key} of {members}"), seconds)

        def write() -> None:
            self.shared_by = group
            for fragment, message in zip(fragments, messages, strict=True):
                fragment.write(message.flat)

        return write

    def _among_those_left(self, work: Callable[[Group], T], key: str, seconds: float, agree: Agree) -> T:
        """What some work comes to among the replicas that are left; tells once who is lost."""
        network = self._session.network
        group, result = among_replicas_left(network, work, seconds, f"{key}, those left", agree)
        lost = tuple(sorted(set(self._everyone) - set(group)))
        if lost and lost != self._told_lost:
            self._told_lost, named = lost, ", ".join(map(str, lost))
            log.warning("replica %d averages without those that are lost: %s", network.rank, named)
        return result


def asked_for(words: Set[str]) -> str:
    """What to average: what those ask for who still train, or all at their end. Raises UserError for unlike things."""
    asked = {word for word in words if not word.endswith(AT_END)} or words
    if len(asked) > 1:
        unlike = ", and another ".join(sorted(asked))
        raise UserError(
            f"one replica averages {unlike}; every replica must call averaged_weights(), average_buffers() and "
            "finish() alike"
        )
    return next(iter(asked))


@contextmanager
def told_of_waiting(rank: int, what: str, seconds: float) -> Iterator[None]:
    """Within, who waits long for the others says so, once."""
    tell_at, gone = time.monotonic() + PATIENCE_SECONDS, GONE.get()

    def look() -> bool:
        nonlocal tell_at
        if time.monotonic() >= tell_at:
            tell_at = math.inf
            warnings.warn(WAITS.format(rank, what, seconds), stacklevel=3)
        return bool(gone and gone())

    token = GONE.set(look)
    try:
        yield
    finally:
        GONE.reset(token)
