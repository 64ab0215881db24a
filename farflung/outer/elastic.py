"""Rounds among replicas that come and go: each round's members are found when it starts.

A message's weight is the number of inner steps behind it, and every message is checked. A replica that was away
downloads the others' state.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.durations import TICKS_PER_SECOND
from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.networks import Group, Party, PeerLostError, Pending, SharedState
from farflung.networks.base import ALONE, CORE_ONLY, HOSTS_AGREE
from farflung.outer.aggregation import Aggregation
from farflung.outer.averaging import Meeting
from farflung.outer.exchange import Exchange
from farflung.outer.fragments import Weights
from farflung.outer.handover import COMES_S, Handover
from farflung.outer.loop import OuterLoop
from farflung.outer.optimizers import OuterOptimizer, ParameterAveraging, after_a_step
from farflung.outer.outcomes import Outcome, Result, Round
from farflung.outer.parties import average_of_party
from farflung.outer.round import Offer, PendingRound, Sync
from farflung.outer.setup import Setup
from farflung.outer.shared import OF, check_shared, shared_tensors, take_shared
from farflung.outer.slow_link import SlowLink
from farflung.outer.whole_state import NearProcesses

log = logging.getLogger(__name__)

T = TypeVar("T")

LOW_BITS = (1 << 31) - 1
"""Of a digest: a float64 holds sums of so many bits exactly."""

IN_TOUCH_S = 5.0
"""How often a replica's processes say that they still wait."""

GIVING_S = 0.1
"""How often one that has ended looks whether others want its state."""

CATCH_UP_SECONDS = 24 * 3600.0
"""Longest wait for the state of a run, in seconds; a stalled transfer ends much earlier."""

NEW_ROUNDS = 4
"""A replica that has trained alone for the time of so many rounds is no newcomer."""

HELD_UP = "held_up_s"
"""The fact that replicas tell each other of their links."""

WHY_ALONE = "alone"
"""The fact of why a replica was alone in its last round: the word's place in ALONE, from 1; 0 where it was not."""


class ElasticLoop(OuterLoop):
    """See OuterLoop; for an elastic network.

    Of a replica that is several processes, only the first is one of its members. The others go by what it says: which
    step counts, who came to a round, when others' state is there. What each of them keeps, it exchanges by itself where
    the network can do that; else the first process keeps all.
    """

    def __init__(self, setup: Setup) -> None:
        assert setup.network.elastic
        self._elastic = setup.network.elastic
        self._fetching: Pending[SharedState | None] | None = None
        self._history = ""
        self._has_averaged = False
        self._began: int | None = None
        """The first step that it has counted."""
        self._since = 0
        """The step of the state that it has taken."""
        self._belongs = False
        """Whether it has averaged with others, or taken their state."""
        self._said_behind: dict[int, set[int | None]] = {}
        """Of each fragment, which hosts have said so since this replica has averaged it with others."""
        self._blamed: dict[int, str] = {}
        self._link = SlowLink()
        super().__init__(setup)
        self._handover = Handover(self._rounds, self.method.needs_equal_anchors)
        self._near = NearProcesses(self.network.near, self.deadline_s)
        own = {cell.name: cell.numel for cell in self._cells_here()}
        told = self.trained.layout.told(own)
        self._values = dict(sorted(cell for kept in told for cell in kept.items()))
        self._elastic.keep(list(self._values), own)

    def _make_outer(self) -> torch.optim.Optimizer:
        outer = super()._make_outer()
        draws_together = self.method.topology.identical and not self.method.needs_equal_anchors
        return ParameterAveraging(outer) if draws_together and not isinstance(outer, OuterOptimizer) else outer

    def aggregation(self) -> Aggregation:
        """See OuterLoop."""
        return Aggregation(self._options["robust"], self._note_offence)

    def _note_offence(self, rank: int, why: str) -> None:
        self._blamed[rank] = why

    def _counted(self, step: int) -> int:
        """Counts a step as the others do; loads their state when a download has ended."""
        every, step = self.method.schedule.every or 1, super()._counted(step)
        rate = TICKS_PER_SECOND if self._clock else 0.0
        counted = self._elastic.paced(step, every, rate)
        wanted = self._handover.due(self._elastic.wanted, counted, self.network.now())
        alone = wanted and self.network.members() == (self.network.rank,)
        self.step, wanted, alone = self._lead((counted, wanted, alone))
        if self._values:  # without rounds there are no anchors
            self._catch_up_if_new(step, every)
        if wanted and self._values:
            if alone:
                self._anchor_weights()
            self._elastic.give(self.state())
        if self._handover.asks_again(self.step):
            self._fetch()
        if self._fetching and any(sync.starts_at(self.step) for sync in self._behind()):
            self._has_come(self._fetching, COMES_S)  # else it starts a round with what it knows is not the others'
        self._take_fetched()
        for sync in self._rounds.syncs:
            sync.skip_to(self.step - sync.every_steps + 1)  # to the latest that has started, which it may yet come to
        if self._clock and self.step != step:
            self._clock.jump(self.step)
        return self.step

    def _catch_up_if_new(self, step: int, every: int) -> None:
        """Takes the others' state where they are far ahead of a replica that has just begun, and has not met any.

        What it has learnt is not worth averaging with theirs. One that has trained for some rounds goes on with what it
        has: of two, one alone says that it is further, and may lie.
        """
        if self._began is None:
            self._began = step
        if self._belongs or self.step - step <= every or step - self._began > NEW_ROUNDS * every:
            return
        if not self.trained.layout.process:
            log.warning("the run is %d steps ahead of this peer, which takes its state first", self.step - step)
        self.catch_up(CATCH_UP_SECONDS)

    def _lead(self, value: T) -> T:
        """What the replica's first process says."""
        return self.trained.layout.told(value)[0]

    def holding(self, sync: Sync[Tensor]) -> Group:
        """See OuterLoop."""
        holders = replace(self.holders, core_only=self._elastic.telling(CORE_ONLY))
        return holders.of(sync.index, self.method.schedule, self.network.members())

    def _group(self, sync: Sync[Tensor]) -> Group:
        members = self.holding(sync)
        if self.method.topology.identical:
            members = self.departures.without(members, sync.index, sync.rounds)
        group = sync.group(self.network.rank, members, self.method.topology)
        if not self.method.topology.identical:
            others_s = self._elastic.others_told(HELD_UP)
            if self._link.stays_out(sync.index, sync.label, others_s):
                group = (self.network.rank,)
        return self._lead(group)

    def report(self, round: Round) -> None:
        """See Session; tells the others for how long rounds hold up this replica."""
        super().report(round)
        self._link.landed(round)
        if (held_up_s := self._link.held_up_s) is not None:
            self._elastic.tell_others(**{HELD_UP: held_up_s})
        reasons = list(ALONE.values())
        self._elastic.tell_others(**{WHY_ALONE: float(round.reason in reasons and reasons.index(round.reason) + 1)})

    def _exchange(self, sync: Sync[Tensor], offer: Offer[Tensor], group: Group) -> Exchange:
        """Starts a round with the members of the group that come, or with others left without partners."""
        message, averaging = offer.message, self._averagings[sync.index]
        whole = self._weights[sync.index].fragment.message(message)
        key = self._round_key(sync.index, sync.rounds)

        def average(party: Party) -> Result:
            with torch.no_grad(), follows():
                return averaged(party)

        def averaged(party: Party) -> Result:
            if party.behind and lineage:
                why = f"the round's host (replica {party.host}) says that its anchors are not the others'"
                return Result(message, (), Outcome.BEHIND, why, host=party.host)
            if len(party.group) < 2:
                stays_out = group == (self.network.rank,) and not self.method.topology.identical
                why = "slow link" if stays_out else party.alone
                return Result(message, (), Outcome.SAT_OUT, ALONE[why])
            if (came := len(party.group)) < (quorum := self.method.quorum):
                return Result(message, (), Outcome.SAT_OUT, f"{came} of a quorum of {quorum} came")
            return average_of_party(self._elastic, party, whole, meeting, averaging, self.deadline_s)

        changes = self.method.needs_equal_anchors  # else messages have weights or anchors in them
        lineage = self._lineage(sync.index) if changes else ""
        done = self.step - self._since if self._clock else sync.trained
        growth = sync.every_steps / max(1, done) if changes else 1.0  # a change grows at most as its steps do
        meeting = Meeting(self.network, group, key, sync.rounds, growth=max(1.0, growth))
        even = self._options["weighting"] == "even"
        weight = 0.0 if offer.fault else 1.0 if even else sync.trained * self._options["step_weight"]
        began, follows = self.network.now(), self.side.following(message)
        return Exchange(began, self._elastic.meet(group, key, self.step, weight, lineage, average))

    def _lineage(self, fragment: int) -> str:
        """A digest of all cells' anchors, the same for every layout."""
        anchors = self._weights[fragment].fragment.message(self.anchors[fragment]).cells.values()
        numbers = [digest(tensors) & LOW_BITS for tensors in anchors]
        own = torch.stack(numbers).sum(0) if numbers else torch.zeros(2)
        return str(self.trained.layout.total(own.to("cpu", torch.float64)).long().tolist())

    def _result(self, pending: PendingRound[Tensor, Exchange]) -> Result:
        """See OuterLoop; what one of the replica's processes has lost, all of them have.

        A bad message is one offence, in however many parts it came, and to however many processes.
        """
        result = super()._result(pending)
        blamed, self._blamed = self._blamed, {}
        came_to = result.group, result.outcome, result.reason, result.compression_error
        told = self.trained.layout.told((came_to, blamed))
        for rank, why in {rank: why for _, offences in told for rank, why in offences.items()}.items():
            self._elastic.blame(rank, why)
        lost = (one for one, _ in told if one[1] == Outcome.PEER_LOST)
        result.group, result.outcome, result.reason, result.compression_error = next(lost, told[0][0])
        return result

    def _settle(self, sync: Sync[Tensor], pending: PendingRound[Tensor, Exchange], result: Result) -> None:
        self._handover.landed(sync.index, result.outcome == Outcome.AVERAGED)
        if result.outcome == Outcome.BEHIND:
            said = self._said_behind.setdefault(pending.fragment, set())
            said.add(result.host)
            if len(said) >= HOSTS_AGREE or not self._has_averaged:
                self._fetch()
        elif result.outcome == Outcome.AVERAGED:
            self._has_averaged = self._belongs = True
            self._said_behind.pop(pending.fragment, None)
        if result.group:  # else the anchor stays as it is
            group = self.network.rank if result.outcome == Outcome.PEER_LOST else result.group
            told = f"{self._history}, round {pending.round} of fragment {pending.fragment} of {group}"
            self._history = hashlib.sha256(told.encode()).hexdigest()[:16]

    @torch.no_grad()
    def _anchor_weights(self) -> None:
        """Makes the weights the anchors, if they are sound.

        For one that trains alone: its anchors are those of its last round, and a newcomer would begin without all that
        was learnt since; in their first round that would then be averaged away.
        """
        if not all(self.trained.layout.told(all(weights.fragment.sound() for weights in self._weights))):
            return
        self._rounds.pending.clear()  # nobody is there to come to them
        for sync, weights in zip(self._rounds.syncs, self._weights, strict=True):
            self._along.before(sync, weights)
            weights.anchor.copy_(weights.fragment.read(weights.anchor.device))
            self._along.after(sync, weights, sync.rounds, Result(weights.anchor, (self.network.rank,)))
            sync.trained, sync.fresh = 0, None

    def state(self) -> SharedState:
        """The state that a late replica downloads: anchors, outer state and step; valid until the next round lands.

        The replica's first process has all of it, the others what they keep.

        Its history is a digest of the rounds that it came of: replicas that have had them all together share it.
        """
        starts = [sync.next_start for sync in self._rounds.syncs]
        until = min([*starts, *(pending.lands_at_step for pending in self._rounds.pending)])
        facts = {"step": self.step, "until": until, "history": self._history}
        whole = self._near.gathered(dict(shared_tensors(self._weights)))
        rest = {cell for one in self._weights[self.method.schedule.fragments :] for cell in one.fragment.names}
        beside = frozenset(name for name in whole if name.partition(OF)[2] in rest)
        return SharedState(dict(sorted(whole.items())), facts, beside=beside)  # in the same order in every layout

    def saved(self) -> None:
        """See Session."""
        if self._lead(self._elastic.keeps) and self._values:
            self._elastic.give(self.state())

    def state_dict(self) -> dict[str, Any]:
        """See OuterLoop."""
        return {**super().state_dict(), "history": self._history}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._history = state.get("history", str(self.network.rank))

    @torch.no_grad()
    def take(self, state: SharedState) -> None:
        """Loads other replicas' state, or what still counts of it; these rounds' pending ones are dropped.

        Raises UserError.
        """
        if not self._begun:
            self._begin()
        told = int(state.facts["step"])
        wanted = self._rounds.syncs if told > self.step else self._behind()
        counts = self._handover.counting(wanted, told, self.step, not self._belongs)
        self._take_shared(state, [self._weights[sync.index] for sync in counts])
        if not counts:
            return
        taken = {sync.index for sync in counts}
        self._rounds.pending[:] = [pending for pending in self._rounds.pending if pending.fragment not in taken]
        self.step = self._since = max(self.step, told)
        if len(counts) == len(self._rounds.syncs):
            self._history = state.facts.get("history", "")
        self._begun = self._belongs = True
        for sync in counts:
            weights = self._weights[sync.index]
            weights.write(weights.anchor)
            self._along.taken(sync, weights)
            sync.skip_to(self.step)
            sync.trained = 0
            self._said_behind.pop(sync.index, None)
        if self._clock:
            self._clock.jump(self.step)

    def _behind(self) -> list[Sync[Tensor]]:
        """The fragments that it needs others' state of: all, for a replica that has none of its own."""
        behind = {*self._said_behind, *self._handover.lacking}
        return [sync for sync in self._rounds.syncs if sync.index in behind or not self._has_averaged]

    def _take_shared(self, state: SharedState, into: Sequence[Weights]) -> None:
        """Raises UserError in all of a replica's processes, where it does not fit in the first."""
        assert self.method.outer is not None
        fault = ""
        try:
            check_shared(state.tensors, self._values, after_a_step(self.method.outer)[1])
        except UserError as error:
            fault = str(error)
        if fault := self._lead(fault):
            raise UserError(fault)
        own = {cell.name for cell in self._cells_here()}
        take_shared(into, self._near.dealt_out(state.tensors, lambda name: name.partition(OF)[2] in own))

    @torch.no_grad()
    def catch_up(self, wait: float) -> bool:
        """Loads the others' state before training; False when nobody has one. Raises UserError when none fits."""
        self._fetch()
        return self._take_fetched(wait)

    def give(self) -> None:
        """See Session."""
        if self._lead(self._elastic.wanted) and self._values:
            self._elastic.give(self.state())

    def give_while(self, wanted: Callable[[], bool]) -> None:
        """See Session."""
        while self._lead(wanted()):
            self.give()
            time.sleep(GIVING_S)

    def _fetch(self) -> None:
        """Starts to download the others' state, unless that has started."""
        if self._fetching is None:
            self._fetching = self._elastic.fetch(self.method.topology.identical)

    def _take_fetched(self, wait: float = 0.0) -> bool:
        """Loads the others' state if it has come, waiting at most `wait` seconds; whether it did.

        A state that does not fit this run is downloaded from another peer instead. With a `wait`, raises the last such
        UserError when no other peer has one.
        """
        refusal = None
        while state := self._fetched(wait):
            try:
                self.take(state)
            except UserError as error:
                refusal = error
                self._elastic.reject(state, str(error))
                self._fetch()
            else:
                self._elastic.accept()
                return True
        if wait and refusal:
            raise refusal
        return False

    def _fetched(self, wait: float) -> SharedState | None:
        if self._fetching is None or not self._has_come(self._fetching, wait):
            return None
        fetching, self._fetching = self._fetching, None
        state = None
        with contextlib.suppress(PeerLostError):
            state = fetching.wait(0.0)
        facts: dict[str, Any] | None = self._lead(state.facts if state else None)
        return None if facts is None else state or SharedState({}, facts)

    def _has_come(self, fetching: Pending[SharedState | None], wait: float) -> bool:
        """Whether a download has ended, after at most `wait` seconds, in which a replica's processes keep in touch."""
        ends = self.network.now() + wait
        while not self._lead(fetching.done()):
            if not self._lead((left := ends - self.network.now()) > 0):
                return bool(wait)
            with contextlib.suppress(PeerLostError):
                fetching.wait(min(left, IN_TOUCH_S))
        return True
