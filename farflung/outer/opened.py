"""Rounds on an open network: who takes part is found out as a round starts, and who was away fetches the others' state.

Messages count by the inner steps behind them, and none goes into a mean before it was looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from farflung.codecs import Codec, finite
from farflung.errors import UserError
from farflung.networks import Group, OpenNetwork, Party, PeerLostError, Pending, State
from farflung.outer.digests import digest
from farflung.outer.meeting import Meeting, Met
from farflung.outer.optimizers import OuterFactory, OuterOptimizer, descend, message_of, step_with
from farflung.outer.streams import Stream
from farflung.outer.topologies import Topology


class Opened:
    """One loop's dealings with an open network.

    Args:
        network: the replica's seat.
        alike: whether all replicas are to hold the same anchors.
        by_lineage: whether only replicas with the same anchors may average; else they are drawn together.
        deadline: the longest that a round is waited for, in seconds.
    """

    def __init__(self, network: OpenNetwork, alike: bool, by_lineage: bool, deadline: float) -> None:
        self.network = network
        self._alike = alike
        self._by_lineage = by_lineage
        self._deadline = deadline
        self._fetching: Pending[State] | None = None

    def start(self, stream: Stream, message: Tensor, wanted: Group, key: str, step: int, weight: float) -> Meeting:
        """Starts a round with those of the group who come, or others whose partners do not."""

        @torch.no_grad()
        def average(party: Party) -> Met:
            if party.behind:
                return Met(message, (), 0.0, "behind", "its anchors are not the others'; it fetches theirs")
            if len(party.group) < 2:
                return Met(message, (), 0.0, "sat out", "")
            pending, error = stream.averaging.start(message, party.group, key, number, party.weights)
            try:
                return Met(pending.wait(self._deadline), party.group, error, "averaged", "")
            except PeerLostError as lost:
                return Met(message, party.group, error, "peer lost", str(lost))

        number = stream.rounds
        lineage = str(digest([stream.anchor]).tolist()) if self._by_lineage else ""
        return Meeting(self.network.meet(wanted, key, step, weight, lineage, average))

    def fetch(self) -> None:
        """Starts to fetch the others' state, unless that is under way."""
        if self._fetching is None:
            self._fetching = self.network.fetch(self._alike)

    def hand_over(self, take: Callable[[State], None], wait: float = 0.0) -> bool:
        """Gives `take` the others' state, when it is there, or after at most `wait` seconds; whether it took one.

        What it refuses with a UserError is fetched from another peer. With a `wait`, raises the last such when
        nobody gives another.
        """
        refusal = None
        while state := self._fetched(wait):
            try:
                take(state)
            except UserError as error:
                refusal = error
                self.network.reject(state, str(error))
                self.fetch()
            else:
                return True
        if wait and refusal:
            raise refusal
        return False

    def _fetched(self, wait: float) -> State | None:
        if self._fetching is None or not (wait or self._fetching.done()):
            return None
        fetching, self._fetching = self._fetching, None
        try:
            return fetching.wait(wait)
        except PeerLostError:
            return None


class Anchored(OuterOptimizer):
    """Any torch optimizer, for replicas that should hold the same anchor φ but may not: the weights θ travel.

    The gradient φ - mean(θ) is the mean pseudo-gradient where anchors are equal; where they are not, it also draws
    them together.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups[0]["params"], {})
        self.inner = inner

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """θ."""
        return weights

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """A step of the optimizer with the gradient φ - mean(θ)."""
        descend(self.inner, anchor, self.gradient(anchor, mean))

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """φ - mean(θ), in the memory of the mean."""
        return torch.sub(anchor, mean, out=mean)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own."""
        self.inner.load_state_dict(state_dict)


def by_lineage(topology: Topology, codec: Codec) -> bool:
    """Whether only replicas with the same anchors may average; else rounds draw them together."""
    return topology.alike and not codec.traits.lossless


def state_of(outer: torch.optim.Optimizer, anchor: Tensor) -> dict[str, Any]:
    """What an outer optimizer keeps of an anchor."""
    state: dict[str, Any] = (outer.inner if isinstance(outer, Anchored) else outer).state.get(anchor, {})
    return state


def state_tensors(anchors: list[Tensor], outer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """The anchors and what the outer optimizer keeps of each, by name."""
    for index, anchor in enumerate(anchors):
        yield f"anchor {index}", anchor
        for name, value in sorted(state_of(outer, anchor).items()):
            if isinstance(value, Tensor) and value.shape == anchor.shape:
                yield f"{name} {index}", value


def kept_names(make: OuterFactory) -> set[str]:
    """The names of what an outer optimizer keeps of an anchor, of its length: what a first step leaves."""
    anchor = torch.zeros(2)
    outer = make([anchor])
    step_with(outer, anchor, message_of(outer, anchor, torch.ones(2)))
    return {name.rpartition(" ")[0] for name, _ in state_tensors([anchor], outer)} - {"anchor"}


def take_state(
    anchors: list[Tensor], outer: torch.optim.Optimizer, tensors: dict[str, Tensor], names: set[str]
) -> None:
    """Gives the anchors and the outer optimizer what `state_tensors` said elsewhere.

    Raises UserError, and changes nothing, when that is not all anchors and, of each, some of what `names` says.
    """
    wanted = {f"anchor {index}": anchor for index, anchor in enumerate(anchors)}
    known = wanted | {f"{name} {index}": anchor for index, anchor in enumerate(anchors) for name in names}
    fits = all(name in known and value.numel() == known[name].numel() for name, value in tensors.items())
    if not fits or not wanted.keys() <= tensors.keys():
        raise UserError("the run's anchors have other shapes than the model here; see that both use the same model")
    if not all(map(finite, tensors.values())):
        raise UserError("a peer gave a state that is not finite; join again, from other peers' RUN/run.ticket")
    state = (outer.inner if isinstance(outer, Anchored) else outer).state
    for name, value in tensors.items():
        kind, anchor = name.rpartition(" ")[0], known[name]
        if kind == "anchor":
            anchor.copy_(value)
        else:
            state[anchor][kind] = value.to(anchor.device, copy=True)
