"""Steps that all peers take together: what one process would do with the large batch, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

from farflung.swarm.letters import LostError, Microbatch, ledger_of
from farflung.swarm.peer import StagePeer
from farflung.swarm.work import Learnt, StageWork

Term = tuple[int, int]
"""A leader's rank among all that lead a run one after the other: a count, and its number. An earlier one is refused:
what it has ordered may still be under way when it is gone."""
Counts = frozenset[int] | None
LONGEST_REIGN = 1000
"""Leaders that may follow each other before a peer hears of them."""


@dataclass(frozen=True)
class Report:
    """What a peer says of a step: the steps that its weights have taken, what it has learnt, and what is under way.

    Args:
        term: of the newest leader that it has heard of.
    """

    term: Term
    stage: int
    version: int
    learnt: frozenset[Microbatch]
    under_way: int


class Participant(Protocol):
    """What a step's leader asks of each peer. All raise LostError where the peer is gone, or follows a later leader."""

    async def report(self, term: Term) -> Report:
        """See Report. From now on it follows this leader, or a later one that it knows."""
        ...

    async def run(self, term: Term, microbatches: list[Microbatch], counts_in: Counts) -> dict[Microbatch, float]:
        """Of a head: takes these through all stages; their losses."""
        ...

    async def learnt_now(self) -> Learnt:
        """What it has learnt in this step."""
        ...

    async def gather(self, term: Term, mates: Mapping[int, str]) -> list[int]:
        """Fetches what its stage mates have learnt, so that it can take the step; those of whom it could not.

        The digest says of which microbatches that must be, by the mate's report: else it could tell each another tale.
        """
        ...

    async def step(self, term: Term) -> None:
        """Takes the step with what it has gathered."""
        ...

    async def settle(self, term: Term) -> None:
        """Drops the microbatches that are under way."""
        ...

    async def catch_up(self, term: Term, version: int, givers: list[int]) -> None:
        """Takes the weights of a version from one of these stage mates, where it has earlier ones.

        Where there are none, its own or a copy count as that version: nobody has later ones of this stage.
        """
        ...


class Members(Protocol):
    """Who is there."""

    def living(self) -> dict[int, Participant]:
        """All peers that are believed alive, by their numbers."""
        ...


@dataclass
class Synchronous:
    """One peer's part in such steps.

    Args:
        take: takes the step with what a stage has learnt, and is done when the weights are those of the next version.
        fetch: takes a version of the weights from one of these peers. Raises LostError.
    """

    peer: StagePeer
    work: StageWork
    members: Members
    take: Callable[[Learnt], Awaitable[None]]
    fetch: Callable[[int, list[int]], Awaitable[None]]
    _term: Term = field(default=(0, 0), init=False)
    _gathered: Learnt | None = field(default=None, init=False)
    _turn: int = field(default=0, init=False)
    """How often it was asked to gather: what it was asked for last counts, whatever comes last."""
    _taking: asyncio.Future[None] | None = field(default=None, init=False)
    """A step that is being taken: one, though several leaders order it."""

    async def report(self, term: Term) -> Report:
        """See Participant."""
        if term[0] <= self._term[0] + LONGEST_REIGN:  # else one could have nobody ever lead after it
            self._term = max(self._term, term)
        await self._taken()
        return Report(self._term, self.peer.stage, self.work.version, self.work.learnt_from(), self.peer.under_way)

    async def run(self, term: Term, microbatches: list[Microbatch], counts_in: Counts) -> dict[Microbatch, float]:
        """See Participant."""
        self._follow(term)
        version = self.work.version
        runs = [self.peer.start(one, version, counts_in) for one in microbatches]
        losses = await asyncio.gather(*runs, return_exceptions=True)
        return {
            one: loss for one, loss in zip(microbatches, losses, strict=True) if not isinstance(loss, BaseException)
        }

    async def learnt_now(self) -> Learnt:
        """See Participant."""
        return self.work.learnt

    async def gather(self, term: Term, mates: Mapping[int, str]) -> list[int]:
        """See Participant. Sums are added in the order of the peers' numbers, alike everywhere."""
        self._follow(term)
        self._gathered, self._turn = None, self._turn + 1
        turn, living = self._turn, self.members.living()
        asked = [mate for mate in sorted(mates) if mate in living]
        found = await asyncio.gather(*(living[mate].learnt_now() for mate in asked), return_exceptions=True)
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, LostError):
                raise one
        told = {mate: one for mate, one in zip(asked, found, strict=True) if isinstance(one, Learnt)}
        learnt = {mate: one for mate, one in told.items() if digest_of(one.samples) == mates[mate]}
        if missing := [mate for mate in mates if mate not in learnt]:
            return missing
        if turn != self._turn:
            raise LostError("it was asked again meanwhile")
        first, *others = learnt.values()
        try:
            self._gathered = first.with_others(others)
        except ValueError as error:
            raise LostError(str(error)) from error
        return []

    @property
    def gathered(self) -> Set[Microbatch] | None:
        """The microbatches of the step that it would take now; None where it has gathered none."""
        return None if self._gathered is None else self._gathered.samples.keys()

    async def step(self, term: Term) -> None:
        """See Participant."""
        self._follow(term)
        if self._taking is None:
            if self._gathered is None:
                raise LostError("it has gathered nothing")
            self._taking = asyncio.ensure_future(self._take(self._gathered))
        await self._taken()

    async def settle(self, term: Term) -> None:
        """See Participant."""
        self._follow(term)
        await self.peer.drop_all()

    async def catch_up(self, term: Term, version: int, givers: list[int]) -> None:
        """See Participant."""
        self._follow(term)
        await self._taken()
        if self.work.version < version:
            await self.fetch(version, givers)

    async def _take(self, gathered: Learnt) -> None:
        self._gathered = None
        try:
            await self.take(gathered)
        finally:
            self._taking = None

    async def _taken(self) -> None:
        """Waits until no step is being taken."""
        if self._taking is not None:
            await asyncio.shield(self._taking)

    def _follow(self, term: Term) -> None:
        if term < self._term:
            raise LostError("another peer leads now")


def digest_of(microbatches: Iterable[Microbatch]) -> str:
    """Says which microbatches some are, in few letters."""
    return hashlib.sha256(repr(ledger_of(microbatches)).encode()).hexdigest()[:32]
