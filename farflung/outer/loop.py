"""The rounds between replicas: the heart of farflung.

weights θ ─┐
anchor φ ──┴─▶ message ─▶ average with the group ─▶ outer optimizer ─▶ φ' ─▶ merge ─▶ θ'
                          (training goes on meanwhile)                 (delay steps later)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.codecs import Codec, Dense, finite
from farflung.networks import Finished, Network, OpenNetwork, Pending, State
from farflung.outer.adaptation import Adapt, Adaptation
from farflung.outer.attached import Attached, Disagreement, Round
from farflung.outer.averaging import Averaging, agree
from farflung.outer.fragments import Fragment, split
from farflung.outer.fusion import Fusion
from farflung.outer.gradients import different_start
from farflung.outer.merges import Keep, Merge
from farflung.outer.opened import Anchored, Opened, by_lineage, state_tensors, take_state
from farflung.outer.optimizers import OuterFactory, OuterOptimizer, gradient_of, message_of, step_with
from farflung.outer.schedules import Schedule
from farflung.outer.streams import Flight, Stream
from farflung.outer.topologies import Topology, group_of


class OuterLoop(Attached):
    """Holds rounds with other replicas while the user trains, hooked to the inner optimizer's step.

    Keeps, for the trainable parameters, one anchor in float32, whatever the outer optimizer and the codec keep, plus
    one message for each fragment in flight, and with a delay what the merge needs: the fragment's weights at the
    round's start, or its own message.

    Args:
        model, optimizer: what the user trains; the weights must start equal on all replicas.
        network: the replica's seat among the others.
        schedule, topology, codec, outer, merge, adapt, gather_up_to: the choices that make a method.
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
        merge: Merge | None = None,
        adapt: Adapt | None = None,
        gather_up_to: int = 2,
        robust: str = "mean",
        outer_device: torch.device | str | None = None,
        deadline: float = 120.0,
        on_round: Callable[[Round], None] | None = None,
    ) -> None:
        super().__init__(network, deadline, on_round)
        self._opened, fusion = None, None
        if isinstance(network, OpenNetwork):
            self._opened = Opened(network, topology.alike, by_lineage(topology, codec), deadline)
            fusion = Fusion(robust, network.blame)
            network.serve(self.state)
        self.schedule = schedule
        self._merge = merge or Keep()
        self._device = torch.device(outer_device) if outer_device else None
        fragments = split(model, schedule.fragments) if schedule.every else [Fragment([])]
        self.anchors = [fragment.read(self._device) for fragment in fragments]
        self.outer = outer(self.anchors)
        if self._opened and topology.alike and not isinstance(self.outer, OuterOptimizer) and codec == Dense():
            self.outer = Anchored(self.outer)
        self._streams = [
            Stream(
                index=index,
                fragment=fragment,
                anchor=anchor,
                averaging=Averaging(
                    network, codec, fragment.views, gather_up_to, topology.alike, f"fragment {index}", fusion
                ),
                adaptation=Adaptation(adapt) if adapt else None,
                every=schedule.every or 0,
                delay=schedule.delay,
                next_start=schedule.first(index),
                rounds=schedule.first(index) // (schedule.every or 1),
            )
            for index, (fragment, anchor) in enumerate(zip(fragments, self.anchors, strict=True))
        ]
        self._inner = optimizer
        self._topology = topology
        self._flights: list[Flight] = []
        self._hook = optimizer.register_step_post_hook(self._after_inner_step)

    @torch.no_grad()
    def _after_inner_step(self, *_: Any) -> None:
        self.network.computed()
        if self._opened:
            self._follow(self._opened)
        else:
            if self.step == 0 and self.schedule.every and not agree(self.network, self.anchors, self.deadline):
                raise Disagreement(different_start(self.network.rank))
            self.step += 1
        fresh = self._land_those_due()
        for stream in self._streams:
            stream.trained += 1
            if stream.due(self.step):
                self._flights.append(self._start(stream, fresh.get(stream.index)))
        self._land_those_due()
        if not self.schedule.every:
            self._judge()  # without rounds, each step answers for itself

    def _follow(self, opened: Opened) -> None:
        """Counts a step as the others do, and takes their state once it has come for one that was behind."""
        self.step = opened.network.paced(self.step + 1, self.schedule.every or 1)
        if state := opened.fetched():
            self.take(state)
        for stream in self._streams:
            stream.skip_to(self.step - stream.every + 1)  # to the latest that has started, which it may yet come to

    def _start(self, stream: Stream, fresh: Tensor | None) -> Flight:
        """Puts a fragment's message on its way to the group; `fresh` is the message if a landing has made it."""
        network = self.network
        key = f"round {stream.rounds} of fragment {stream.index}"
        group = group_of(network.rank, self._topology.groups(network.members(), key))
        if not self._opened and stream.averaging.wants_expectation(group):
            stream.averaging.expect(message_of(self.outer, stream.anchor, stream.anchor.clone()))
        weights, fault = self._weights_to_offer(stream)
        at_start = weights.clone() if self._merge.needs_start and stream.delay else None
        message = message_of(self.outer, stream.anchor, weights) if fresh is None else fresh
        own = message.clone() if self._merge.eager else None
        if self._merge.eager and fresh is None and group:
            self._step_alone(stream, message, len(group))
        started, error, outcome = network.now(), 0.0, "sat out"
        pending: Pending[Tensor] = Finished(message, started)
        if self._opened:
            weight = 0.0 if fault else float(stream.trained)
            pending = self._opened.start(stream, message, group, key, self.step, weight)
        elif group:
            pending, error = stream.averaging.start(message, group, key)
        if group:
            outcome = "no progress offered" if fault else "averaged"
        stream.trained = 0
        flight = Flight(
            fragment=stream.index,
            round=stream.rounds,
            group=group,
            started_step=self.step,
            lands_at=self.step + stream.delay,
            started=started,
            message=message,
            pending=pending,
            own=own,
            at_start=at_start,
            compression_error=error,
            outcome=outcome,
            reason=fault,
        )
        stream.rounds += 1
        if self.schedule.final is not None:
            stream.every = self.schedule.every_at(self.step)
        stream.next_start += stream.every
        return flight

    def _weights_to_offer(self, stream: Stream) -> tuple[Tensor, str]:
        """A fragment's weights; or its anchor and what was wrong, when training has spoilt them since the last round.

        The anchor stands for no progress. So what is not finite never travels, and no partner waits in vain.
        """
        weights = stream.fragment.read(self._device)
        if not finite(weights):
            self.spoil("the weights are not finite")
        fault = self._judge()
        if fault:
            weights.copy_(stream.anchor)
            stream.fragment.write(weights)
            for parameter in stream.fragment.parameters:
                self._inner.state.pop(parameter, None)  # the inner optimizer's moments may be spoilt, too
        return weights, fault

    def _land(self, flight: Flight) -> Tensor | None:
        """Gives a round's mean to the outer optimizer, and its new anchor to the weights.

        An eager merge returns the message that it has made of the weights before that.
        """
        waited_from = self.network.now()
        mean = flight.wait(self.deadline)
        landed = self.network.now()
        if self._opened and flight.outcome == "behind":
            self._opened.fetch()
        stream = self._streams[flight.fragment]
        effective_rank, share = self._adapt(stream, mean) if flight.group else (None, None)
        fresh = None
        if flight.group:
            if flight.own is not None:
                fresh = message_of(self.outer, stream.anchor, stream.fragment.read(self._device))
                mean.add_(fresh - flight.own, alpha=1 / len(flight.group))
            step_with(self.outer, stream.anchor, mean)
            overlapped = flight.lands_at > flight.started_step
            # The mean has done its work: its memory serves for the weights.
            merged = stream.anchor
            if overlapped:
                now = stream.fragment.read(out=mean[: stream.fragment.numel])
                merged = self._merge.merge(now, flight.at_start, stream.anchor)
            stream.fragment.write(merged)
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
                compression_error=flight.compression_error,
                effective_rank=effective_rank,
                share=share,
                every=stream.every if stream.adaptation else None,
            )
        )
        return fresh

    def _step_alone(self, stream: Stream, message: Tensor, group_size: int) -> None:
        """The first step of an eager merge, when nobody has been heard yet: the others count as without progress."""
        nothing = message_of(self.outer, stream.anchor, stream.anchor.clone())
        step_with(self.outer, stream.anchor, nothing.lerp_(message, 1 / group_size))
        stream.fragment.write(stream.anchor)

    def _adapt(self, stream: Stream, mean: Tensor) -> tuple[float | None, float | None]:
        """Follows the effective rank: how much the codec may send, and how many steps the next round is away."""
        if stream.adaptation is None:
            return None, None
        rank, share = stream.adaptation.observe(stream.fragment.views(gradient_of(self.outer, stream.anchor, mean)))
        stream.averaging.shrink_to(share)
        if stream.adaptation.settings.steps:
            stream.every, stream.delay = self.schedule.shortened(share)
        return rank, share

    def _land_those_due(self) -> dict[int, Tensor]:
        """Lands the rounds whose time has come; an eager merge's fresh messages, by fragment."""
        due = [flight for flight in self._flights if flight.lands_at <= self.step]
        fresh = {}
        for flight in due:
            self._flights.remove(flight)
            message = self._land(flight)
            if message is not None:
                fresh[flight.fragment] = message
        return fresh

    @torch.no_grad()
    def land(self) -> None:
        """Lands all rounds in flight now, however much of their delay is left."""
        while self._flights:
            self._land(self._flights.pop(0))

    def state(self) -> State:
        """Where the run stands, for a replica that comes late: anchors, what the outer optimizer keeps, and the step.

        It stays good until the next round starts.
        """
        starts = [stream.next_start for stream in self._streams]
        return State(dict(state_tensors(self.anchors, self.outer)), {"step": self.step, "until": min(starts)})

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Goes on from where other replicas stand; what was under way here is dropped. Raises UserError."""
        take_state(self.anchors, self.outer, state.tensors)
        self._flights.clear()
        self.step = max(self.step, int(state.facts["step"]))
        for stream in self._streams:
            stream.fragment.write(stream.anchor)
            stream.skip_to(self.step + 1)

    @torch.no_grad()
    def catch_up(self, wait: float) -> bool:
        """Takes the others' state before training, on an open network; False when nobody is there to give it."""
        if self._opened is None:
            return False
        self._opened.fetch()
        state = self._opened.fetched(wait)
        if state:
            self.take(state)
        return state is not None

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer optimizer, what codecs remember, and rounds in flight.

        These are waited for, but land in their own time.
        """
        return {
            **super().state_dict(),
            "outer": self.outer.state_dict(),
            "flights": [flight.packed(flight.wait(self.deadline), self.network.now()) for flight in self._flights],
            "streams": [stream.state_dict() for stream in self._streams],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict` of a loop with the same model and schedule."""
        super().load_state_dict(state)
        self.outer.load_state_dict(state["outer"])
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self._flights = [
            Flight.unpacked(saved, self.anchors[saved["fragment"]].device, self.network.now())
            for saved in state["flights"]
        ]
