"""The rounds between replicas: the heart of farflung.

weights θ ─┐
anchor φ ──┴─▶ message ─▶ average with the group ─▶ outer optimizer ─▶ φ' ─▶ merge ─▶ θ'
                          (training goes on meanwhile)                 (delay steps later)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farflung.networks import Finished, Network, OpenNetwork, PeerLostError, State
from farflung.networks.joining import log
from farflung.outer.attached import Attached, Options
from farflung.outer.fragments import Fragment, split
from farflung.outer.fusion import Fusion
from farflung.outer.healing import Compared, draw_together, stay_away
from farflung.outer.opened import Anchored, Opened, by_lineage, kept_names, state_of, state_tensors, take_state
from farflung.outer.optimizers import OuterOptimizer, gradient_of, load_into, refuse_rounded_weights, sends_weights
from farflung.outer.replica import Replica
from farflung.outer.scaling import unscaled_steps
from farflung.outer.start import Fact, method_facts
from farflung.outer.steps import hook_steps
from farflung.outer.streams import Flight, Offer, Stream, copied, streams_of

if TYPE_CHECKING:
    from farflung.outer.method import Method


class OuterLoop(Attached):
    """Holds rounds with other replicas while the user trains, hooked to the inner optimizers' steps.

    A step of the last optimizer is an inner step. Keeps, for the parameters that the optimizers train, one anchor in
    float32, whatever the outer optimizer and the codec keep, plus one message for each fragment in flight, and with a
    delay what the merge needs: the fragment's weights at the round's start, or its own message.

    Args:
        method: the choices that its rounds are made of.
        model, optimizers: what the user trains; the weights must start equal on all replicas.
        network, options, undo: see Attached.

    Raises, out of `optimizer.step()`:
        DisagreementError: at the first step, if replicas start from different weights.
        DivergedError: after three rounds in a row in which this replica's weights or losses were not finite.
        UserError: when what is trained changes, or an optimizer puts back what rounds have changed.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        network: Network,
        options: Options,
        undo: ExitStack,
    ) -> None:
        schedule, topology, codec = method.schedule, method.topology, method.codec
        super().__init__(method, model, optimizers, network, options, undo)
        self._opened, fusion = None, None
        if isinstance(network, OpenNetwork):
            self._opened = Opened(network, topology.alike, by_lineage(topology, codec), self.deadline)
            fusion = partial(Fusion, options.robust, network.blame)
            network.serve(self.state)
        device = torch.device(options.outer_device) if options.outer_device else None
        fragments = split(model, schedule.fragments, self.trained.parameters) if schedule.every else [Fragment([])]
        self.anchors = [fragment.read(device) for fragment in fragments]
        assert method.outer is not None
        self.outer = method.outer(self.anchors)
        refuse_rounded_weights(self.outer, codec, self.anchors if self._opened else ())
        if self._opened and topology.alike and not isinstance(self.outer, OuterOptimizer) and codec.traits.lossless:
            self.outer = Anchored(self.outer)
        self._streams = streams_of(method, network, fragments, self.anchors, sends_weights(self.outer), fusion)
        self._replica = Replica(self.trained, self._untrained, self._streams, self.outer, method.merge, device)
        self._flights: list[Flight] = []
        self._spoilt: tuple[int, str] = (-1, "")
        self._everyone = network.members()
        self.trained.restore = self._restore_if_spoilt
        for optimizer in optimizers:
            self._undo.callback(unscaled_steps(optimizer))
        self._undo.callback(hook_steps(optimizers[-1], after=self._after_inner_step))

    def _facts(self) -> list[Fact]:
        return method_facts(self.method, self.outer)

    def _begin(self) -> None:
        self._replica.begin()

    def _writing_weights(self) -> AbstractContextManager[None]:
        return self._replica.copies.following()

    def _settle(self) -> None:
        self.spoil(self._replica.fault())
        if fault := self._faults.judge(self.step, self.step):
            log.warning("replica %d ends with the weights of its last round: %s", self.network.rank, fault)
            self._replica.restore(self._flights)

    @torch.no_grad()
    def _after_inner_step(self) -> None:
        self.network.computed()
        self._replica.copies.stepped()
        if self._opened:
            self._follow(self._opened)
        else:
            self.step += 1
        if self.step & (self.step - 1) == 0:  # from the start, since a first round may be long
            self._look()
        fresh = self._land_those_due()
        for stream in self._streams:
            stream.trained += 1
            if stream.due(self.step):
                self._flights.append(self._start(stream, fresh.get(stream.index)))
        self._land_those_due()
        if not self.method.schedule.every:
            self._faults.judge(self.step, self.step)  # without rounds, each step answers for itself

    def _follow(self, opened: Opened) -> None:
        """Counts a step as the others do, and takes their state once it has come for one that was behind."""
        self.step = opened.network.paced(self.step + 1, self.method.schedule.every or 1)
        opened.hand_over(self.take)
        for stream in self._streams:
            stream.skip_to(self.step - stream.every + 1)  # to the latest that has started, which it may yet come to

    def _start(self, stream: Stream, fresh: Offer | None) -> Flight:
        """Puts a fragment's message on its way to the group; a landing may have made a `fresh` one already."""
        network, method = self.network, self.method
        self.trained.check()
        self.trained.check_left_alone()
        self._look()
        group = stream.next_group(network, method.topology)
        if not self._opened and stream.averaging.wants_expectation(group):
            stream.averaging.expect(self._replica.nothing(stream.anchor))
        offer = fresh or self._offer(stream)
        message = offer.message
        at_start, own = self._replica.kept_until_landing(stream, message)
        if method.merge.eager and fresh is None and group:
            self._replica.step_alone(stream, offer, len(group))
        flight = Flight(
            fragment=stream.index,
            round=stream.rounds,
            group=group,
            started_step=self.step,
            lands_at=self.step + stream.delay,
            started=network.now(),
            message=message,
            pending=Finished(message, network.now()),
            own=own,
            anchor=offer.anchor,
            applied=offer.applied,
            at_start=at_start,
            compression_error=0.0,
            outcome="no progress offered" if offer.fault else "averaged" if group else "sat out",
            reason=offer.fault,
        )
        if self._opened:
            weight = 0.0 if offer.fault else float(stream.trained)
            flight.pending = self._opened.start(stream, message, group, stream.key(self._name), self.step, weight)
        elif group:
            flight.pending, flight.compression_error = stream.start(message, group, self._name, network, method)
        stream.began(self.step, method.schedule, group)
        flight.lands_at = min(flight.lands_at, stream.next_start)  # one that starts late, after an interrupt, say
        return flight

    def _offer(self, stream: Stream) -> Offer:
        """What to send of a fragment in its next round: its progress, or none where training has been spoilt.

        Then the whole replica goes back to its anchors, and all fragments of the round offer nothing. So what is not
        finite never travels, and no partner waits in vain.
        """
        self.spoil(self._replica.fault())
        if fault := self._faults.judge(stream.rounds, self.step):
            self._replica.restore(self._flights)
            self._spoilt = (stream.rounds, fault)
            self.trained.restore_beside()  # else what is wrong there would come back from there
        return self._replica.offer(stream, self._spoilt[1] if stream.rounds <= self._spoilt[0] else "")

    def _restore_if_spoilt(self, *landing: Flight) -> None:
        """Goes back to the anchors at once where weights are not finite; the next round says so."""
        if fault := self._replica.fault():
            self.spoil(fault)
            self._replica.restore([*landing, *self._flights])

    def _land(self, flight: Flight, starts: bool) -> Offer | None:
        """Gives a round's mean to the outer optimizer, and its new anchor to the weights.

        Where the fragment's next round starts now, an eager merge returns what it has made of the weights before that,
        to offer there.
        """
        waited_from = self.network.now()
        mean = flight.wait(self.deadline)
        stream = self._streams[flight.fragment]
        if self._opened and flight.outcome == "behind":
            self._opened.fetch()
        if flight.apart:
            self._heal(stream, flight, mean)
        elif flight.outcome == "peer lost" and isinstance(flight.pending, Compared):
            stay_away(self.network, flight.group, stream.key(self._name, flight.round))
        landed = self.network.now()
        effective_rank, share = self._adapt(stream, flight, mean)
        fresh = None
        if flight.lands_at > flight.started_step:
            self._restore_if_spoilt(flight)  # which landing may hide
        if flight.group or flight.applied:
            if flight.own is not None and starts and (group := stream.next_group(self.network, self.method.topology)):
                fresh = self._offer(stream)
                fresh.applied = 1 / len(group)
            self._replica.absorb(stream, flight, mean, fresh)
            if self._options.buffers == "round" and flight.fragment == 0:
                try:
                    self._average_buffers_in(flight.round, flight.group)
                except PeerLostError as lost:
                    flight.note("peer lost", str(lost))
        stream.lost |= flight.outcome == "peer lost"
        every = stream.every if stream.adaptation else None
        self._report(flight.told(self.step, waited_from, landed, effective_rank, share, every))
        return fresh

    def _heal(self, stream: Stream, flight: Flight, mean: Tensor) -> None:
        """Makes anchors, outer momentum and schedule equal again in a group that was found to hold different ones."""
        key = stream.key(self._name, flight.round)
        state = state_of(self.outer, stream.anchor)
        try:
            pace = draw_together(stream.anchor, state, stream.pace(), self.network, flight.group, key, self.deadline)
        except PeerLostError as lost:
            flight.note("peer lost", str(lost))  # the next round tries again
            return
        stream.keep_pace(pace)
        stream.lost = False
        if flight.own is not None:
            flight.own.copy_(mean)  # what is left of the own part in the anchors' mean

    def _adapt(self, stream: Stream, flight: Flight, mean: Tensor) -> tuple[float | None, float | None]:
        """Follows the effective rank: how much the codec may send, and how many steps the next round is away.

        Where steps adapt all must see the same means, so a round that somebody may have missed counts for nobody.
        """
        adaptation = stream.adaptation
        if adaptation is None or not flight.group:
            return None, None
        if adaptation.settings.steps and (flight.outcome == "peer lost" or flight.group != self._everyone):
            return None, None
        rank, share = adaptation.observe(stream.fragment.views(gradient_of(self.outer, stream.anchor, mean)))
        stream.averaging.shrink_to(share)
        if adaptation.settings.steps:
            stream.every, stream.delay = self.method.schedule.shortened(share)
        return rank, share

    def _land_those_due(self) -> dict[int, Offer]:
        """Lands the rounds whose time has come; an eager merge's fresh offers, by fragment."""
        due = [flight for flight in self._flights if flight.lands_at <= self.step]
        fresh = {}
        for flight in due:
            self._flights.remove(flight)
            stream = self._streams[flight.fragment]
            try:
                offer = self._land(flight, starts=stream.due(self.step))
            except BaseException:  # as when a user interrupts a wait, and goes on
                stream.lost = True
                raise
            if offer is not None:
                fresh[flight.fragment] = offer
        return fresh

    @torch.inference_mode(False)
    @torch.no_grad()
    def land(self) -> None:
        """Lands all rounds in flight now, however much of their delay is left."""
        while self._flights:
            self._land(self._flights.pop(0), starts=False)

    def state(self) -> State:
        """What a late replica takes: anchors, outer optimizer's state and step; good until the next round starts."""
        facts = {"step": self.step, "until": min(stream.next_start for stream in self._streams)}
        return State(dict(state_tensors(self.anchors, self.outer)), facts)

    @torch.no_grad()
    def take(self, state: State) -> None:
        """Goes on from where other replicas stand; what was under way here is dropped. Raises UserError."""
        if not self._begun:
            self._begin()
        assert self.method.outer is not None
        take_state(self.anchors, self.outer, state.tensors, kept_names(self.method.outer))
        self._flights.clear()
        self.step = max(self.step, int(state.facts["step"]))
        self._begun = True
        for stream in self._streams:
            self._replica.take_anchor(stream)
            stream.skip_to(self.step + 1)

    @torch.no_grad()
    def catch_up(self, wait: float) -> bool:
        """Takes the others' state before training, on an open network; False when nobody is there to give it.

        Raises UserError when all give what cannot be this run's.
        """
        if self._opened is None:
            return False
        self._opened.fetch()
        return self._opened.hand_over(self.take, wait)

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer optimizer, what codecs remember, and rounds in flight.

        These are waited for, but land in their own time.
        """
        return {
            **super().state_dict(),
            "spoilt": self._spoilt,
            "outer": self.outer.state_dict(),
            "copies": self._replica.copies.state_dict(),
            "flights": [flight.packed(flight.wait(self.deadline), self.network.now()) for flight in self._flights],
            "streams": [stream.state_dict() for stream in self._streams],
        }

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        self._spoilt = state["spoilt"]
        load_into(self.outer, copied(state["outer"], self.anchors[0].device))
        self._replica.copies.load_state_dict(state["copies"])
        for stream, saved in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(saved)
        self._flights = [
            Flight.unpacked(saved, self.anchors[saved["fragment"]].device, self.network.now())
            for saved in state["flights"]
        ]
