"""The rounds between replicas: the heart of farflung.

weights θ ─┐
anchor φ ──┴─▶ message ─▶ average with the group ─▶ outer optimizer ─▶ φ' ─▶ merge ─▶ θ'
                          (training goes on meanwhile)                 (delay steps later)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farflung.codecs import Codec
from farflung.networks import Finished, Group, Network, PeerLost, Pending
from farflung.outer.attached import Attached, Disagreement, Round, finite
from farflung.outer.averaging import agree, average
from farflung.outer.fragments import Fragment, split
from farflung.outer.gradients import different_start
from farflung.outer.optimizers import OuterFactory, message_of, step_with
from farflung.outer.schedules import Schedule
from farflung.outer.topologies import Topology


@dataclass
class _Flight:
    """A round between its start and its landing."""

    fragment: int
    round: int
    group: Group
    started_step: int
    started: float
    message: Tensor
    pending: Pending[Tensor]
    weights_at_start: Tensor | None
    outcome: str
    reason: str


class OuterLoop(Attached):
    """Holds rounds with other replicas while the user trains, hooked to the inner optimizer's step.

    Keeps, for the trainable parameters, one anchor in float32 and whatever the outer optimizer keeps, plus one
    message for each fragment in flight, and with a delay the fragment's weights at the round's start.

    Args:
        model, optimizer: what the user trains; the weights must start equal on all replicas.
        network: the replica's seat among the others.
        schedule, topology, codec, outer: the choices that make a method.
        outer_device: where the outer state lives; by default, with the model.
        deadline: the longest that a round is waited for, in seconds.
        on_round: told of every round when it has landed.

    Raises, out of `optimizer.step()`:
        Disagreement: at the first step, if replicas start from different weights.
        Diverged: after three rounds in a row in which this replica's weights or losses were not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        network: Network,
        *,
        schedule: Schedule,
        topology: Topology,
        codec: Codec,
        outer: OuterFactory,
        outer_device: torch.device | str | None = None,
        deadline: float = 120.0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        super().__init__(network, deadline, on_round)
        self.schedule = schedule
        self.fragments = split(model, schedule.fragments) if schedule.every else [Fragment([])]
        self._device = torch.device(outer_device) if outer_device else None
        self.anchors = [fragment.read(self._device) for fragment in self.fragments]
        self.outer = outer(self.anchors)
        self._inner = optimizer
        self._topology = topology
        self._codec = codec
        self._flights: list[_Flight] = []
        self._hook = optimizer.register_step_post_hook(self._after_inner_step)

    @torch.no_grad()
    def _after_inner_step(self, *_: Any) -> None:
        self.network.computed()
        if self.step == 0 and self.schedule.every and not agree(self.network, self.anchors, self.deadline):
            raise Disagreement(different_start(self.network.rank))
        self.step += 1
        self._land_those_due()
        for fragment in self.schedule.starting(self.step):
            self._flights.append(self._start(fragment))
        self._land_those_due()
        if not self.schedule.every:
            self._judge()  # without rounds, each step answers for itself

    def _start(self, index: int) -> _Flight:
        """Puts a fragment's message on its way to the group."""
        network, anchor = self.network, self.anchors[index]
        weights, fault = self._weights_to_offer(index)
        at_start = weights.clone() if self.schedule.delay else None

        number = self.step // (self.schedule.every or 1)
        key = f"round {number} of fragment {index}"
        group = self._topology.group(network.rank, network.members(), key)
        started = network.now()
        if group:
            message = message_of(self.outer, anchor, weights)
            pending = average(network, self._codec, message, group, key)
            outcome = "no progress offered" if fault else "averaged"
        else:
            message, outcome = weights, "sat out"
            pending = Finished(message, started)
        return _Flight(index, number, group, self.step, started, message, pending, at_start, outcome, fault)

    def _weights_to_offer(self, index: int) -> tuple[Tensor, str]:
        """A fragment's weights; or its anchor and what was wrong, when training has spoilt them since the last round.

        The anchor stands for no progress. So what is not finite never travels, and no partner waits in vain.
        """
        weights = self.fragments[index].read(self._device)
        if not finite(weights):
            self.spoil("the weights are not finite")
        fault = self._judge()
        if fault:
            weights.copy_(self.anchors[index])
            self.fragments[index].write(weights)
            for parameter in self.fragments[index].parameters:
                self._inner.state.pop(parameter, None)  # the inner optimizer's moments may be spoilt, too
        return weights, fault

    def _land(self, flight: _Flight) -> None:
        """Gives a round's mean to the outer optimizer, and its new anchor to the weights."""
        waited_from = self.network.now()
        mean = self._wait_for(flight)
        landed = self.network.now()
        fragment, anchor = self.fragments[flight.fragment], self.anchors[flight.fragment]
        if flight.group:
            step_with(self.outer, anchor, mean)
            if flight.weights_at_start is None:
                fragment.write(anchor)
            else:
                # The steps since the round began are kept: they come on top of the new anchor.
                weights_now = fragment.read(out=mean)
                fragment.write(weights_now.sub_(flight.weights_at_start).add_(anchor))
        self._on_round(
            Round(
                round=flight.round,
                fragment=flight.fragment,
                group=flight.group,
                started_step=flight.started_step,
                step=self.step,
                started=flight.started,
                finished=flight.pending.finished_at,
                waited_from=waited_from,
                landed=landed,
                outcome=flight.outcome,
                reason=flight.reason,
            )
        )

    def _wait_for(self, flight: _Flight) -> Tensor:
        """A round's mean. The policy for lost peers: this replica's own message where there is no mean."""
        try:
            return flight.pending.wait(self.deadline)
        except PeerLost as lost:
            flight.outcome, flight.reason = "peer lost", str(lost)
            # A copy: a peer that is only late may still be writing its values into the message.
            return flight.message.clone()

    def _land_those_due(self) -> None:
        due = [flight for flight in self._flights if flight.started_step + self.schedule.delay <= self.step]
        for flight in due:
            self._flights.remove(flight)
            self._land(flight)

    @torch.no_grad()
    def land(self) -> None:
        """Lands all rounds in flight now, however much of their delay is left."""
        while self._flights:
            self._land(self._flights.pop(0))

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer optimizer and rounds in flight; these are waited for, but land in their own time."""
        return {
            **super().state_dict(),
            "anchors": self.anchors,
            "outer": self.outer.state_dict(),
            "flights": [self._packed(flight) for flight in self._flights],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of a loop with the same model and schedule."""
        super().load_state_dict(state)
        for anchor, saved in zip(self.anchors, state["anchors"], strict=True):
            anchor.copy_(saved)
        self.outer.load_state_dict(state["outer"])
        self._flights = [self._unpacked(saved) for saved in state["flights"]]

    def _packed(self, flight: _Flight) -> dict[str, Any]:
        """A flight as plain values; its times as ages, since clocks begin anew with a process."""
        mean = self._wait_for(flight)
        finished = flight.pending.finished_at
        flight.pending = Finished(mean, finished)
        now = self.network.now()
        return {**vars(flight), "message": mean, "started": flight.started - now, "pending": finished - now}

    def _unpacked(self, saved: dict[str, Any]) -> _Flight:
        device, now = self.anchors[saved["fragment"]].device, self.network.now()
        message, at_start = saved["message"].to(device), saved["weights_at_start"]
        changes = {
            "message": message,
            "weights_at_start": None if at_start is None else at_start.to(device),
            "started": saved["started"] + now,
            "pending": Finished(message, saved["pending"] + now),
        }
        return _Flight(**{**saved, **changes})
