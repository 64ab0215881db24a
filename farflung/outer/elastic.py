"""Rounds among replicas that come and go: each round's members are found when it starts.

A message's weight is the number of inner steps behind it, and every message is checked. A replica that was away
downloads the others' state.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.codecs import finite
from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.networks import Group, Party, PeerLostError, Pending, SharedState
from farflung.outer.aggregation import Aggregation
from farflung.outer.averaging import Meeting
from farflung.outer.exchange import Exchange
from farflung.outer.fragments import ANCHOR, Weights
from farflung.outer.loop import OuterLoop
from farflung.outer.optimizers import OuterOptimizer, ParameterAveraging, after_a_step
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.round import Offer, PendingRound, Sync
from farflung.outer.session import Setup

T = TypeVar("T")

OF = " of "
"""Between what a tensor is and the name of its cell."""

IN_TOUCH_S = 5.0
"""How often a replica's processes say that they still wait."""

OTHER_SHAPES = "the run's anchors have other shapes than the model here; see that both use the same model"


class ElasticLoop(OuterLoop):
    """See OuterLoop; for an elastic network.

    Of a replica that is several processes, only the first is on it. The others go by what it says: which step counts,
    who came to a round and how it ended, when others' state is there.
    """

    def __init__(self, setup: Setup) -> None:
        assert setup.network.elastic
        self._elastic = setup.network.elastic
        self._fetching: Pending[SharedState | None] | None = None
        self._history = ""
        super().__init__(setup)
        self._elastic.serve(self.state)

    def _make_outer(self) -> torch.optim.Optimizer:
        outer = super()._make_outer()
        draws_together = self.method.topology.identical and self.method.codec.traits.lossless
        return ParameterAveraging(outer) if draws_together and not isinstance(outer, OuterOptimizer) else outer

    def _aggregation(self) -> Aggregation:
        return Aggregation(self._options["robust"], self._elastic.blame)

    def _counted(self, step: int) -> int:
        """Counts a step as the others do; loads their state when a download has ended."""
        self.step = self._lead(self._elastic.paced(step, self.method.schedule.every or 1))
        self._take_fetched()
        for sync in self._rounds.syncs:
            sync.skip_to(self.step - sync.every_steps + 1)  # to the latest that has started, which it may yet come to
        return self.step

    def _lead(self, value: T) -> T:
        """What the replica's first process says."""
        return self.trained.layout.lead(value)

    def _group(self, sync: Sync[Tensor]) -> Group:
        return self._lead(super()._group(sync))

    def _exchange(self, sync: Sync[Tensor], offer: Offer[Tensor], group: Group) -> Exchange:
        """Starts a round with the members of the group that come, or with others left without partners."""
        message, number, averaging = offer.message, sync.rounds, self._averagings[sync.index]
        cells = self._weights[sync.index].fragment.message(message)
        key = self._round_key(sync.index, number)

        @torch.no_grad()
        def average(party: Party) -> Result:
            if party.behind:
                return Result(message, (), Outcome.BEHIND, "its anchors are not the others'; it fetches theirs")
            if len(party.group) < 2:
                return Result(message, (), Outcome.SAT_OUT)
            pending, error = averaging.start(cells, Meeting(self.network, party.group, key, number, party.weights))
            try:
                return Result(pending.wait(self.deadline_s), party.group, compression_error=error)
            except PeerLostError as lost:
                return Result(message, party.group, Outcome.PEER_LOST, str(lost), error)

        lineage = str(digest([self.anchors[sync.index]]).tolist()) if self.method.needs_equal_anchors else ""
        weight = 0.0 if offer.fault else sync.trained * self._options["step_weight"]
        began = self.network.now()
        return Exchange(began, self._elastic.meet(group, key, self.step, weight, lineage, average))

    def _result(self, pending: PendingRound[Tensor, Exchange]) -> Result:
        result = super()._result(pending)
        told = self._lead((result.group, result.outcome, result.reason, result.compression_error))
        result.group, result.outcome, result.reason, result.compression_error = told
        return result

    def _settle(self, sync: Sync[Tensor], pending: PendingRound[Tensor, Exchange], result: Result) -> None:
        if result.outcome == Outcome.BEHIND:
            self._fetch()
        if result.group:  # else the anchor stays as it is
            group = self.network.rank if result.outcome == Outcome.PEER_LOST else result.group
            told = f"{self._history}, round {pending.round} of fragment {pending.fragment} of {group}"
            self._history = hashlib.sha256(told.encode()).hexdigest()[:16]

    def state(self) -> SharedState:
        """The state that a late replica downloads: anchors, outer state and step; valid until the next round lands.

        Its history is a digest of the rounds that it came of: replicas that have had them all together share it.
        """
        starts = [sync.next_start for sync in self._rounds.syncs]
        until = min([*starts, *(pending.lands_at_step for pending in self._rounds.pending)])
        facts = {"step": self.step, "until": until, "history": self._history}
        return SharedState(dict(shared_tensors(self._weights)), facts)

    def state_dict(self) -> dict[str, Any]:
        """See OuterLoop."""
        return {**super().state_dict(), "history": self._history}

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._history = state.get("history", str(self.network.rank))

    @torch.no_grad()
    def take(self, state: SharedState) -> None:
        """Loads other replicas' state; pending rounds here are dropped. Raises UserError."""
        if not self._begun:
            self._begin()
        self._take_shared(state)
        self._rounds.pending.clear()
        self.step = max(self.step, int(state.facts["step"]))
        self._history = state.facts.get("history", "")
        self._begun = True
        for sync, weights in zip(self._rounds.syncs, self._weights, strict=True):
            weights.write(weights.anchor)
            sync.skip_to(self.step + 1)

    def _take_shared(self, state: SharedState) -> None:
        """Raises UserError in all of a replica's processes, where it does not fit in the first."""
        assert self.method.outer is not None
        fault = ""
        try:
            take_shared(self._weights, state.tensors, after_a_step(self.method.outer)[1])
        except UserError as error:
            fault = str(error)
        if fault := self._lead(fault):
            raise UserError(fault)

    @torch.no_grad()
    def catch_up(self, wait: float) -> bool:
        """Loads the others' state before training; False when nobody has one. Raises UserError when none fits."""
        self._fetch()
        return self._take_fetched(wait)

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


def shared_tensors(all_weights: Iterable[Weights]) -> Iterator[tuple[str, Tensor]]:
    """The anchors, and what the outer optimizer keeps of them, cell by cell, by name."""
    for weights in all_weights:
        for cell, kept in weights.fragment.apart(weights.shared()).items():
            for kind, value in kept.items():
                yield f"{kind}{OF}{cell}", value


def take_shared(all_weights: Sequence[Weights], tensors: Mapping[str, Tensor], kinds: Collection[str]) -> None:
    """Takes another replica's `shared_tensors`; besides anchors they may be of these kinds.

    Raises UserError, and changes nothing, unless all fit.
    """
    values = {cell.name: cell.numel for weights in all_weights for cell in weights.fragment.cells}
    cells: dict[str, dict[str, Tensor]] = {name: {} for name in values}
    for name, value in tensors.items():
        kind, _, cell = name.partition(OF)
        if value.numel() != values.get(cell) or kind not in (ANCHOR, *kinds):
            raise UserError(OTHER_SHAPES)
        cells[cell][kind] = value
    if not all(ANCHOR in kept for kept in cells.values()):
        raise UserError(OTHER_SHAPES)
    if not all(map(finite, tensors.values())):
        raise UserError("a peer gave a state that is not finite; join again, from other peers' RUN/run.ticket")
    for weights in all_weights:
        weights.take_shared(weights.fragment.together(cells))
