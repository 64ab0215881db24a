"""Steps that all peers take together: what one process would do with the large batch, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from farflung.swarm.letters import LostError, Microbatch
from farflung.swarm.peer import StagePeer
from farflung.swarm.work import Learnt, StageWork

SETTLING_SECONDS = 0.05
"""Between two looks whether what is under way has come to its end."""

AVOIDED = 3
"""A peer from whom its mates got nothing so often in a row is left out."""
PARDONED = 100
"""It is tried again after about so many steps."""
LONGEST_REIGN = 1000
"""Leaders that may follow each other before a peer hears of them."""

T = TypeVar("T")
Term = tuple[int, int]
"""A leader's rank among all that lead a run one after the other: a count, and its number. An earlier one is refused:
what it has ordered may still be under way when it is gone."""
Counts = frozenset[int] | None
Missing = dict[Microbatch, set[int]]


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

    async def gather(self, term: Term, mates: list[int]) -> list[int]:
        """Fetches what its stage mates have learnt, so that it can take the step; those of whom it could not."""
        ...

    async def step(self, term: Term) -> None:
        """Takes the step with what it has gathered."""
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
    _taking: asyncio.Future[None] | None = field(default=None, init=False)
    """A step that is being taken: one, though several leaders order it."""

    async def report(self, term: Term) -> Report:
        """See Participant."""
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

    async def gather(self, term: Term, mates: list[int]) -> list[int]:
        """See Participant. Sums are added in the order of the peers' numbers, alike everywhere."""
        self._follow(term)
        living = self.members.living()
        asked = [mate for mate in sorted(mates) if mate in living]
        found = await asyncio.gather(*(living[mate].learnt_now() for mate in asked), return_exceptions=True)
        learnt = {mate: one for mate, one in zip(asked, found, strict=True) if isinstance(one, Learnt)}
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, LostError):
                raise one
        if missing := [mate for mate in mates if mate not in learnt]:
            return missing
        first, *others = learnt.values()
        self._gathered = first.with_others(others)
        return []

    async def step(self, term: Term) -> None:
        """See Participant."""
        self._follow(term)
        if self._taking is None:
            if self._gathered is None:
                raise LostError("it has gathered nothing")
            self._taking = asyncio.ensure_future(self._take(self._gathered))
        await self._taken()

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


@dataclass
class Leader:
    """Leads steps. Any head can, one at a time; who follows a dead one finds out how far its step had come.

    A step is taken once each stage has learnt from each microbatch, and each peer has what its mates have learnt: then
    no death can undo it. What a dead peer had learnt alone is run again, and only its stage counts it.

    Args:
        number: its own, unlike those of all other leaders.
    """

    members: Members
    stages: int
    number: int
    losses: dict[Microbatch, float] = field(default_factory=dict)
    _count: int = field(default=0, init=False)
    _avoided: Counter[int] = field(default_factory=Counter, init=False)
    """How often in a row others of its stage did not get from a peer what it has learnt, though it is there; of one
    that is left out, the steps since then besides."""

    @property
    def term(self) -> Term:
        """See Term."""
        return self._count, self.number

    async def furthest(self) -> int:
        """The most steps that the weights of some living peer have taken."""
        reports = await self._reports(self.members.living())
        return max((report.version for report in reports.values()), default=0)

    async def bring_up(self, step: int) -> None:
        """Has those who have missed steps take the weights of the others."""
        living = self.members.living()
        await self._caught_up(step, living, await self._reports(living))

    async def step(self, step: int, microbatches: list[Microbatch]) -> None:
        """Sees to it that all living peers take a step. Those with earlier weights catch up first."""
        while True:
            living = self.members.living()
            reports = await self._reports(living)
            if any(report.term > self.term for report in reports.values()):
                self._count = 1 + max(report.term[0] for report in reports.values())
                continue
            if any(report.version > step for report in reports.values()):
                behind = {peer: living[peer] for peer, report in reports.items() if report.version == step}
                await self._asked(behind, lambda _, one: one.step(self.term))
                return
            if await self._caught_up(step, living, reports):
                continue
            if any(report.under_way for report in reports.values()):
                await asyncio.sleep(SETTLING_SECONDS)
                continue
            missing = _missing(reports.values(), microbatches, self.stages)
            if missing:
                await self._run(living, reports, missing)
            elif await self._gathered(living, reports):
                await self._asked(living, lambda _, one: one.step(self.term))
                return

    async def _caught_up(self, step: int, living: dict[int, Participant], reports: dict[int, Report]) -> bool:
        """Has those with earlier weights take later ones; whether some have. The others are left out of this step."""
        behind = {peer: report for peer, report in reports.items() if report.version < step}
        givers: dict[int, list[int]] = {}
        for peer, report in sorted(reports.items()):
            if report.version == step:
                givers.setdefault(report.stage, []).append(peer)
        furthest: dict[int, int] = {}
        for peer, report in sorted(behind.items(), key=lambda one: one[1].version):
            furthest[report.stage] = peer
        asked = {p: living[p] for p, one in behind.items() if one.stage in givers or furthest[one.stage] == p}
        done = await self._asked(
            asked, lambda peer, one: one.catch_up(self.term, step, givers.get(reports[peer].stage, []))
        )
        for peer in behind:
            del reports[peer], living[peer]
        return bool(done)

    async def _run(self, living: dict[int, Participant], reports: dict[int, Report], missing: Missing) -> None:
        """Deals what is missing to the heads, by the stages that miss it."""
        heads = sorted(peer for peer, report in reports.items() if report.stage == 0)
        if not heads:
            await asyncio.sleep(SETTLING_SECONDS)
            return
        shares: dict[tuple[int, Counts], list[Microbatch]] = {}
        for place, (microbatch, where) in enumerate(sorted(missing.items())):
            counts_in = None if len(where) == self.stages else frozenset(where)
            shares.setdefault((heads[place % len(heads)], counts_in), []).append(microbatch)
        runs = [living[head].run(self.term, share, counts_in) for (head, counts_in), share in shares.items()]
        for losses in await asyncio.gather(*runs, return_exceptions=True):
            if isinstance(losses, dict):
                self.losses |= losses

    async def _gathered(self, living: dict[int, Participant], reports: dict[int, Report]) -> bool:
        """Has each peer fetch what its mates have learnt; whether all could."""
        mates: dict[int, list[int]] = {}
        for peer, report in sorted(reports.items()):
            mates.setdefault(report.stage, []).append(peer)
        asked = {peer: living[peer] for peer in reports}
        missed = await self._asked(asked, lambda peer, one: one.gather(self.term, mates[reports[peer].stage]))
        avoided = Counter(mate for peer in missed for mate in missed[peer])
        # By most of the others: one that they find false, or cannot reach. Of two who blame each other one goes on.
        worst = max(avoided, key=lambda one: (avoided[one], one), default=None)
        if worst in reports and 2 * avoided[worst] >= len(mates[reports[worst].stage]):
            self._avoided[worst] += 1
        elif not avoided:
            self._avoided = Counter({p: n + 1 for p, n in self._avoided.items() if AVOIDED <= n < PARDONED})
        return len(missed) == len(living) and not avoided

    async def _reports(self, living: dict[int, Participant]) -> dict[int, Report]:
        """What those say who can be believed; who is avoided by its mates is left out, and out of the `living`."""
        for peer, often in self._avoided.items():
            if often >= AVOIDED:
                living.pop(peer, None)
        reports = await self._asked(living, lambda _, one: one.report(self.term))
        for peer in reports.keys() - believed(reports).keys():
            del living[peer], reports[peer]
        return reports

    async def _asked(
        self, peers: dict[int, Participant], question: Callable[[int, Participant], Awaitable[T]]
    ) -> dict[int, T]:
        """The answers of those who give one."""
        answers = await asyncio.gather(*(question(peer, one) for peer, one in peers.items()), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LostError):
                raise answer
        return {
            peer: answer for peer, answer in zip(peers, answers, strict=True) if not isinstance(answer, BaseException)
        }


def believed(reports: dict[int, Report]) -> dict[int, Report]:
    """The reports without those of peers that say to be far ahead of nearly all others.

    Else one of them alone could end a run, or have leaders count beyond all bounds.
    """
    versions = sorted(report.version for report in reports.values())
    terms = sorted(report.term[0] for report in reports.values())
    few = (len(reports) - 1) // 3  # so many alone are not believed
    if not few:
        return reports
    version, term = versions[-1 - few] + 1, terms[-1 - few] + LONGEST_REIGN
    return {peer: one for peer, one in reports.items() if one.version <= version and one.term[0] <= term}


def _missing(reports: Iterable[Report], microbatches: list[Microbatch], stages: int) -> Missing:
    """The stages that have not learnt from a microbatch, for each that some have not."""
    learnt: list[set[Microbatch]] = [set() for _ in range(stages)]
    for report in reports:
        learnt[report.stage] |= report.learnt
    found = {one: {stage for stage in range(stages) if one not in learnt[stage]} for one in microbatches}
    return {one: where for one, where in found.items() if where}
