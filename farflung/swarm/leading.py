"""Who leads the steps that all peers take together: see `farflung.swarm.synchronous`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from farflung.swarm.letters import LostError, Microbatch
from farflung.swarm.synchronous import LONGEST_REIGN, Counts, Members, Participant, Report, Term, digest_of
from farflung.swarm.waits import LATE, LEAST_SECONDS, Waits, without_late

LOOK_SECONDS = 1.0
"""Between two looks at those who are there, while heads take microbatches through the stages."""
SETTLING_SECONDS = 0.05
"""Between two looks whether what is under way has come to its end."""
MATES = 2.0
"""An answer that others hold up may take so many times as long: nobody is blamed for whom it waits for."""

AVOIDED = 3
"""A peer from whom others got nothing so often in a row is left out."""
PARDONED = 100
"""It is tried again after about so many steps."""

T = TypeVar("T")
Missing = dict[Microbatch, set[int]]


@dataclass
class Leader:
    """Leads steps. Any head can, one at a time; who follows a dead one finds out how far its step had come.

    A step is taken once each stage has learnt from each microbatch, and each peer has what its mates have learnt: then
    no death can undo it. What a dead peer had learnt alone is run again, and only its stage counts it. So is what one
    had learnt that is silent or late: it is left out of the step, and catches up when it answers again.

    Args:
        number: its own, unlike those of all other leaders.
        patience: seconds that a peer may take at most to catch up.
    """

    members: Members
    stages: int
    number: int
    patience: float = 120.0
    losses: dict[Microbatch, float] = field(default_factory=dict)
    _count: int = field(default=0, init=False)
    _avoided: Counter[int] = field(default_factory=Counter, init=False)
    """How often in a row a peer that is there did not answer, or others of its stage did not get from it what it has
    learnt; of one that is left out, the steps since then besides."""
    _out: set[int] = field(default_factory=set, init=False)
    """Those that are left out of this step."""
    _runs: _Runs = field(default_factory=lambda: _Runs(), init=False)

    def __post_init__(self) -> None:
        self._catching_up, self._heads = Waits(self.patience), Waits(self.patience)

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
        self._out = set()
        living = self.members.living()
        await self._caught_up(step, living, await self._reports(living))

    async def step(self, step: int, microbatches: list[Microbatch]) -> None:
        """Sees to it that all living peers take a step. Those with earlier weights catch up first."""
        self._out, self._runs = set(), _Runs()
        try:
            while not await self._is_taken(step, microbatches):
                pass
        finally:
            self._runs.end()

    async def _is_taken(self, step: int, microbatches: list[Microbatch]) -> bool:
        """Does what the step needs next; whether it is taken."""
        living = self.members.living()
        reports = await self._reports(living)
        if any(report.term > self.term for report in reports.values()):
            self._count = 1 + max(report.term[0] for report in reports.values())
            return False
        if any(report.version > step for report in reports.values()):
            behind = {peer: living[peer] for peer, report in reports.items() if report.version == step}
            await self._asked(behind, lambda _, one: one.step(self.term))
            return True
        if await self._caught_up(step, living, reports) or await self._go_on(living, reports):
            return False
        missing = _missing(reports.values(), microbatches, self.stages)
        if missing:
            await self._run(living, reports, missing)
        elif await self._gathered(living, reports):
            await self._asked(living, lambda _, one: one.step(self.term))
            return True
        return False

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
        began = _now()
        done = await self._asked(
            asked,
            lambda peer, one: one.catch_up(self.term, step, givers.get(reports[peer].stage, [])),
            lambda peer, _: self._catching_up.seconds(peer),
        )
        for peer in asked:
            if peer in done:
                self._catching_up.took(peer, _now() - began)
            else:
                self._catching_up.failed(peer, _now() - began, _now())
                self._leave_out(peer)
        for peer in behind:
            del reports[peer], living[peer]
        return bool(done)

    async def _go_on(self, living: dict[int, Participant], reports: dict[int, Report]) -> bool:
        """Lets what is under way come to its end, but no longer than that takes usually; whether something is."""
        if self._runs.under_way:
            await self._runs.go_on(self._heads, self.losses)
            return True
        if not any(report.under_way for report in reports.values()):
            return False
        if _now() > self._runs.ended + LEAST_SECONDS:
            await self._asked(living, lambda _, one: one.settle(self.term))
            self._runs.ended = _now()
        else:
            await asyncio.sleep(SETTLING_SECONDS)
        return True

    async def _run(self, living: dict[int, Participant], reports: dict[int, Report], missing: Missing) -> None:
        """Deals what is missing to the heads, by the stages that miss it; one that was late gets none for a while."""
        heads = sorted(peer for peer, report in reports.items() if report.stage == 0)
        late = self._heads.left_out(_now())
        heads = [head for head in heads if head not in late] or heads
        if not heads:
            await asyncio.sleep(SETTLING_SECONDS)
            return
        shares: dict[tuple[int, Counts], list[Microbatch]] = {}
        for place, (microbatch, where) in enumerate(sorted(missing.items())):
            counts_in = None if len(where) == self.stages else frozenset(where)
            shares.setdefault((heads[place % len(heads)], counts_in), []).append(microbatch)
        runs = {(head, counts): living[head].run(self.term, share, counts) for (head, counts), share in shares.items()}
        self._runs.begin(runs, lambda head, half: self._allowed(head, MATES * half, MATES * LEAST_SECONDS))

    async def _gathered(self, living: dict[int, Participant], reports: dict[int, Report]) -> bool:
        """Has each peer fetch what its mates have learnt; whether all could."""
        mates: dict[int, dict[int, str]] = {}
        for peer, report in sorted(reports.items()):
            mates.setdefault(report.stage, {})[peer] = digest_of(report.learnt)
        missed = await self._asked(
            {peer: living[peer] for peer in reports},
            lambda peer, one: one.gather(self.term, mates[reports[peer].stage]),
            lambda peer, half: self._allowed(peer, MATES * half, MATES * LEAST_SECONDS),
        )
        for peer in reports.keys() - missed.keys():
            self._leave_out(peer)
        avoided = Counter(mate for peer in missed for mate in missed[peer])
        # By most of the others: one that they find false, or cannot reach. Of two who blame each other one goes on.
        worst = max(avoided, key=lambda one: (avoided[one], one), default=None)
        if worst in reports and 2 * avoided[worst] >= len(mates[reports[worst].stage]):
            self._avoided[worst] += 1
        elif not avoided:
            self._avoided = Counter({peer: _later(n) for peer, n in self._avoided.items() if peer not in reports})
        return len(missed) == len(living) and not avoided

    async def _reports(self, living: dict[int, Participant]) -> dict[int, Report]:
        """What those say who can be believed; the others are left out, and out of the `living`."""
        for peer in [peer for peer in living if self._avoided[peer] >= AVOIDED or peer in self._out]:
            del living[peer]
        reports = await self._asked(living, lambda _, one: one.report(self.term))
        for peer in living.keys() - reports.keys():
            self._leave_out(peer)
        reports = apart(believed(reports))
        for peer in living.keys() - reports.keys():
            del living[peer]
        if len({report.stage for report in reports.values()}) < self.stages:
            self._out.clear()  # a stage has nobody else
            self._avoided.clear()
        return reports

    def _leave_out(self, peer: int) -> None:
        """It is asked nothing more in this step."""
        self._out.add(peer)
        self._avoided[peer] += 1

    def _allowed(self, peer: int, half: float, least: float = LEAST_SECONDS) -> float:
        """Seconds that one may take with an answer that half of those who were asked gave after `half`."""
        if peer == self.number or math.isinf(half):
            return math.inf
        return max(least, LATE * half) * 2.0 ** self._avoided[peer]

    async def _asked(
        self,
        peers: dict[int, Participant],
        question: Callable[[int, Participant], Awaitable[T]],
        allowed: Callable[[int, float], float] | None = None,
    ) -> dict[int, T]:
        """The answers of those who give one in time."""
        asked = {peer: asyncio.ensure_future(question(peer, one)) for peer, one in peers.items()}
        try:
            await without_late(asked, allowed or self._allowed)
        finally:
            for answer in asked.values():
                answer.cancel()
        return {peer: answer.result() for peer, answer in asked.items() if _is_given(answer)}


@dataclass
class _Runs:
    """What a leader has ordered heads to take through all stages, in one step.

    Args:
        ended: when the last of them did.
    """

    ended: float = field(default_factory=lambda: _now())
    _began: float = 0.0
    _asked: dict[tuple[int, Counts], asyncio.Future[dict[Microbatch, float]]] = field(default_factory=dict)
    _all: asyncio.Future[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether some have not ended, or their losses were not asked for."""
        return self._all is not None

    def begin(
        self,
        runs: Mapping[tuple[int, Counts], Awaitable[dict[Microbatch, float]]],
        allowed: Callable[[int, float], float],
    ) -> None:
        """Has heads begin, each with what counts in some stages."""
        self._began = _now()
        self._asked = {one: asyncio.ensure_future(run) for one, run in runs.items()}
        self._all = asyncio.ensure_future(without_late(self._asked, lambda one, half: allowed(one[0], half)))

    async def go_on(self, heads: Waits, losses: dict[Microbatch, float]) -> None:
        """Waits a moment. When all have ended but for late ones, it is known who was, and the losses."""
        assert self._all is not None
        await asyncio.wait([self._all], timeout=LOOK_SECONDS)
        if not self._all.done():
            return
        self._all, self.ended = None, _now()
        for (head, _), run in self._asked.items():
            if _is_given(run):
                losses |= run.result()
            else:
                heads.failed(head, self.ended - self._began, self.ended)

    def end(self) -> None:
        """Nobody waits for them any more."""
        for run in self._asked.values():
            run.cancel()
        if self._all is not None:
            self._all.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_given(answer: asyncio.Future[Any]) -> bool:
    """Whether there is one. Raises what is no LostError."""
    if not answer.done() or answer.cancelled():
        return False
    error = answer.exception()
    if error is not None and not isinstance(error, LostError):
        raise error
    return error is None


def _later(often: int) -> int:
    """How often one that is left out did not answer, as it counts a step later; it gets another chance at last."""
    if often < AVOIDED:
        return often
    return often + 1 if often < PARDONED else AVOIDED - 1


def apart(reports: dict[int, Report]) -> dict[int, Report]:
    """The reports without those of peers whose mates have learnt from the same microbatches.

    One that was away for a moment comes back with what was run again meanwhile. Who shares most is left out first.
    """
    left = dict(reports)
    while True:
        claims = Counter((one.stage, microbatch) for one in left.values() for microbatch in one.learnt)
        shared = {peer: sum(claims[one.stage, m] > 1 for m in one.learnt) for peer, one in left.items()}
        worst = max(left, key=lambda peer: (shared[peer], len(left[peer].learnt), peer), default=None)
        if worst is None or not shared[worst]:
            return left
        del left[worst]


def believed(reports: dict[int, Report]) -> dict[int, Report]:
    """The reports without those of peers that say to be far ahead of nearly all others.

    Else one of them alone could end a run, or have leaders count beyond all bounds.
    """
    version = most_believed(report.version for report in reports.values()) + 1
    term = most_believed(report.term[0] for report in reports.values()) + LONGEST_REIGN
    return {peer: one for peer, one in reports.items() if one.version <= version and one.term[0] <= term}


def most_believed(told: Iterable[float]) -> float:
    """The most that peers say, but for what fewer than a third of them say alone."""
    found = sorted(told)
    return found[-1 - (len(found) - 1) // 3]


def _missing(reports: Iterable[Report], microbatches: list[Microbatch], stages: int) -> Missing:
    """The stages that have not learnt from a microbatch, for each that some have not."""
    learnt: list[set[Microbatch]] = [set() for _ in range(stages)]
    for report in reports:
        learnt[report.stage] |= report.learnt
    found = {one: {stage for stage in range(stages) if one not in learnt[stage]} for one in microbatches}
    return {one: where for one, where in found.items() if where}
