"""Rounds among replicas that come and go: each round's members are found when it starts.

A message's weight is the number of inner steps behind it, and every message is checked. A replica that was away
downloads the others' state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from farflung.codecs import finite
from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.networks import Group, Party, PeerLostError, Pending, SharedState
from farflung.outer.aggregation import Aggregation
from farflung.outer.loop import Exchange, OuterLoop
from farflung.outer.optimizers import (
    OuterFactory,
    OuterOptimizer,
    ParameterAveraging,
    message_of,
    state_by_anchor,
    state_of,
    step_with,
)
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.round import Offer, PendingRound, Sync
from farflung.outer.session import Setup


class ElasticLoop(OuterLoop):
    """See OuterLoop; for an elastic network."""

    def __init__(self, setup: Setup) -> None:
        assert setup.network.elastic
        self._elastic = setup.network.elastic
        self._fetching: Pending[SharedState] | None = None
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
        self.step = self._elastic.paced(step, self.method.schedule.every or 1)
        self._take_fetched()
        for sync in self._rounds.syncs:
            sync.skip_to(self.step - sync.every_steps + 1)  # to the latest that has started, which it may yet come to
        return self.step

    def _prepare(self, sync: Sync[Tensor], members: int) -> None:
        """Nothing: the members are not known yet."""

    def _exchange(self, sync: Sync[Tensor], offer: Offer[Tensor], group: Group) -> Exchange:
        """Starts a round with the members of the group that come, or with others left without partners."""
        message, number, averaging = offer.message, sync.rounds, self._averagings[sync.index]
        key = self._round_key(sync.index, number)

        @torch.no_grad()
        def average(party: Party) -> Result:
            if party.behind:
                return Result(message, (), Outcome.BEHIND, "its anchors are not the others'; it fetches theirs")
            if len(party.group) < 2:
                return Result(message, (), Outcome.SAT_OUT)
            pending, error = averaging.start(message, party.group, key, number, party.weights)
            try:
                return Result(pending.wait(self.deadline_s), party.group, compression_error=error)
            except PeerLostError as lost:
                return Result(message, party.group, Outcome.PEER_LOST, str(lost), error)

        lineage = str(digest([self.anchors[sync.index]]).tolist()) if self.method.needs_equal_anchors else ""
        weight = 0.0 if offer.fault else float(sync.trained)
        began = self.network.now()
        return Exchange(began, self._elastic.meet(group, key, self.step, weight, lineage, average))

    def _settle(self, sync: Sync[Tensor], pending: PendingRound[Tensor, Exchange], result: Result) -> None:
        if result.outcome == Outcome.BEHIND:
            self._fetch()

    def state(self) -> SharedState:
        """The state that a late replica downloads: anchors, outer state and step; valid until the next round starts."""
        facts = {"step": self.step, "until": min(sync.next_start for sync in self._rounds.syncs)}
        return SharedState(dict(state_tensors(self.anchors, self.outer)), facts)

    @torch.no_grad()
    def take(self, state: SharedState) -> None:
        """Loads other replicas' state; pending rounds here are dropped. Raises UserError."""
        if not self._begun:
            self._begin()
        assert self.method.outer is not None
        take_state(self.anchors, self.outer, state.tensors, kept_names(self.method.outer))
        self._rounds.pending.clear()
        self.step = max(self.step, int(state.facts["step"]))
        self._begun = True
        for sync, weights in zip(self._rounds.syncs, self._weights, strict=True):
            weights.write(weights.anchor)
            sync.skip_to(self.step + 1)

    @torch.no_grad()
    def catch_up(self, wait: float) -> bool:
        """Loads the others' state before training; False when nobody has one.

        Raises UserError when none of their states fits this run.
        """
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
                return True
        if wait and refusal:
            raise refusal
        return False

    def _fetched(self, wait: float) -> SharedState | None:
        if self._fetching is None or not (wait or self._fetching.done()):
            return None
        fetching, self._fetching = self._fetching, None
        try:
            return fetching.wait(wait)
        except PeerLostError:
            return None


def state_tensors(anchors: list[Tensor], outer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The anchors and what the outer optimizer keeps of each, by name."""
    for index, anchor in enumerate(anchors):
        yield f"anchor {index}", anchor
        for name, value in sorted(state_of(outer, anchor).items()):
            if isinstance(value, Tensor) and value.shape == anchor.shape:
                yield f"{name} {index}", value


def kept_names(make: OuterFactory) -> set[str]:
    """The names of the tensors of an anchor's length that an outer optimizer keeps after a first step."""
    anchor = torch.zeros(2, dtype=torch.float32, device="cpu")
    outer = make([anchor])
    step_with(outer, anchor, message_of(outer, anchor, torch.ones_like(anchor)))
    return {name.rpartition(" ")[0] for name, _ in state_tensors([anchor], outer)} - {"anchor"}


def take_state(
    anchors: list[Tensor], outer: torch.optim.Optimizer, tensors: dict[str, Tensor], names: set[str]
) -> None:
    """Loads the `state_tensors` of another replica into anchors and outer optimizer.

    Raises UserError, and changes nothing, unless they are all anchors and tensors of the given names.
    """
    wanted = {f"anchor {index}": anchor for index, anchor in enumerate(anchors)}
    known = wanted | {f"{name} {index}": anchor for index, anchor in enumerate(anchors) for name in names}
    fits = all(name in known and value.numel() == known[name].numel() for name, value in tensors.items())
    if not fits or not wanted.keys() <= tensors.keys():
        raise UserError("the run's anchors have other shapes than the model here; see that both use the same model")
    if not all(map(finite, tensors.values())):
        raise UserError("a peer gave a state that is not finite; join again, from other peers' RUN/run.ticket")
    state = state_by_anchor(outer)
    for name, value in tensors.items():
        kind, anchor = name.rpartition(" ")[0], known[name]
        if kind == "anchor":
            anchor.copy_(value)
        else:
            state[anchor][kind] = value.to(anchor.device, copy=True)
