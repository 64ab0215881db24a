"""The rounds between replicas: the heart of farflung.

weights θ ─┐
anchor φ ──┴─▶ message ─▶ average with the group ─▶ outer optimizer ─▶ φ' ─▶ merge ─▶ θ'
                          (training goes on meanwhile)                 (delay steps later)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from farflung.cells import Cell
from farflung.hooks.copies import Copies
from farflung.hooks.loads import LATE_LOAD
from farflung.hooks.scaling import unscaled_steps
from farflung.hooks.steps import hook_steps
from farflung.networks import Finished, Group, PeerLostError
from farflung.networks.base import seats_of
from farflung.networks.torchrun import log
from farflung.outer.adaptation import effective_ranks
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.beside import SideStream
from farflung.outer.clock import Clock
from farflung.outer.columns import Column, Message
from farflung.outer.companions.base import Alongs
from farflung.outer.exchange import Compared, Exchange, facts_of, start_columns, started, weighed
from farflung.outer.fragments import Weights
from farflung.outer.fusing import radial_of
from farflung.outer.healing import draw_together, sketch, stay_away
from farflung.outer.optimizers import gradient_of, load_into, refuse_rounded_weights, sends_weights
from farflung.outer.outcomes import LEFT_OVER, Outcome, Result, Round
from farflung.outer.pace import Pace
from farflung.outer.replica import Replica
from farflung.outer.round import Offer, PendingRound, Rounds, Sync
from farflung.outer.session import Session
from farflung.outer.setup import Setup
from farflung.outer.states import cells_kept, paced, packed, take_cells, unpacked

if TYPE_CHECKING:
    from farflung.outer.aggregation import Aggregation


class OuterLoop(Session):
    """Holds rounds with other replicas while the user trains, hooked to the inner optimizers' steps.

    A step of the last optimizer is an inner step. The model's weights must start equal on all replicas. Keeps one
    float32 anchor of the trained parameters, the state of outer optimizer and codec, and one message for each pending
    round; with a delay also what the merge needs: the weights at the round's start, or the own message.

    This is for members that stay; rounds go on without those that are lost. See ElasticLoop for others.

    Raises, out of `optimizer.step()`:
        DisagreementError: at the first step, if replicas start from different weights.
        DivergedError: after three rounds in a row in which this replica's weights or losses were not finite.
        UserError: when what is trained changes, or an optimizer puts back what rounds have changed.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        method, network, optimizers = setup.method, setup.network, setup.optimizers
        schedule = method.schedule
        device = torch.device(given) if (given := setup.options["outer_device"]) else None
        fragments = self.holders.fragments(setup.model, schedule.fragments, self._exchanged())
        self.anchors = [fragment.read(device) for fragment in fragments]
        self.outer: torch.optim.Optimizer = self._make_outer()
        parameters = [fragment.parameters for fragment in fragments]
        self.copies = Copies(optimizers, parameters if any(parameters) else [self.trained.parameters])
        self._weights = [
            Weights(fragment, anchor, self.outer, method.merge, partial(self.copies.following, index))
            for index, (fragment, anchor) in enumerate(zip(fragments, self.anchors, strict=True))
        ]
        exact = sends_weights(self.outer)
        rule, fused = self.aggregation, partial(radial_of, method.fuse, model=setup.model, outer=self.outer)
        self._averagings = [Averaging(network.rank, method, exact, rule(), radial=fused(one)) for one in fragments]
        self._replica = Replica(self._weights, self.trained, self.untrained, self.copies, self._faults)
        self._rounds = Rounds[Tensor, Exchange](self.holders.schedules(schedule, len(fragments)), self._weights)
        parts = zip(self._rounds.syncs, self._averagings, strict=True)
        self._paces = [Pace(sync, averaging, method.adapt) for sync, averaging in parts]
        self._everyone = seats_of(network)
        self.side = SideStream()
        self._clock = Clock(setup.options["clock"] or network.now) if schedule.by_clock else None
        self._held = False  # whether a round has started in this step
        self._along = Alongs([companion.along(self) for companion in method.companions])
        self.trained.restore = lambda: self._replica.restore_if_spoilt(self._rounds.pending)
        for optimizer in optimizers:
            self.undo.callback(unscaled_steps(optimizer))
        self.undo.callback(hook_steps(optimizers[-1], after=self._after_inner_step))

    def _exchanged(self) -> Mapping[str, nn.Parameter]:
        """What rounds average, by name."""
        return self.trained.named if self.method.schedule.every else {}

    def _make_outer(self) -> torch.optim.Optimizer:
        assert self.method.outer is not None
        outer = self.method.outer(self.anchors)
        # On an elastic network messages are always encoded, so that they can be checked.
        refuse_rounded_weights(outer, self.method.codec, self.anchors if self.network.elastic else ())
        return outer

    def aggregation(self) -> Aggregation | None:
        """The rule by which a fragment's messages are aggregated, where they must be looked at."""
        return None

    @torch.no_grad()
    def _after_inner_step(self) -> None:
        self.network.advance()
        self.copies.stepped()
        self.step = self._counted(self.step + 1)
        if self.step & (self.step - 1) == 0:  # from the start, since a first round may be long
            self._look()
        self._held = False
        if self.method.momentum:
            self.method.momentum.steer(self.outer, self.step)
        for due in self._rounds.after(self.step):
            if isinstance(due, Sync):
                self._held = True
                self._start(due)
            else:
                self._apply(due, starts=self._rounds.syncs[due.fragment].starts_at(self.step))
        if not self.method.schedule.every:
            self._faults.judge(self.step, self.step)  # without rounds, each step answers for itself

    def _counted(self, step: int) -> int:
        """The step that this replica counts after one of its own; by the clock, it is a tenth of a second."""
        if self._clock is None:
            return step
        # No further than its next round: there all replicas count the same, however late they come.
        return self.trained.layout.told(min(self._clock.ticks, self._rounds.syncs[0].next_start))[0]

    def _begin_counting(self) -> None:
        if self._clock:
            self._clock.begin(self.network, self.key(f"clock at step {self.step}"), self.starting_s)

    @property
    def together(self) -> bool:
        """See Session; by the clock, only where a round starts."""
        return self._clock is None or self._held or bool(self.network.elastic)

    def _start(self, sync: Sync[Tensor]) -> None:
        """Puts a fragment's message on its way to the group."""
        self.trained.check()
        self.trained.check_left_alone()
        self._look()
        averaging, weights = self._averagings[sync.index], self._weights[sync.index]
        self._along.before(sync, weights)
        group = self._group(sync)
        if group and not self.network.elastic and averaging.wants_reference():  # elsewhere members are not known yet
            averaging.set_reference(weights.fragment.message(weights.nothing()))
        offer = sync.offer(partial(self._fault, sync), len(group))
        self.departures.comes(sync.index, sync.rounds, group or (self.network.rank,))
        exchange = self._exchange(sync, offer, group)
        self._rounds.pending.append(sync.start(self.step, group, offer, exchange))

    def holding(self, sync: Sync[Tensor]) -> Group:
        """The members that hold a fragment."""
        return self.holders.of(sync.index, self.method.schedule, self.network.members())

    def _group(self, sync: Sync[Tensor]) -> Group:
        """With whom the next round is to be held."""
        members, topology = self.holding(sync), self.method.topology
        if topology.identical:  # who draws groups at random must draw from the same members, whoever knows of what
            members = self.departures.without(members, sync.index, sync.rounds)
        return sync.group(self.network.rank, members, topology)

    def _fault(self, sync: Sync[Tensor]) -> str:
        return self._replica.fault(sync.rounds, self.step, self._rounds.pending)

    def _exchange(self, sync: Sync[Tensor], offer: Offer[Tensor], group: Group) -> Exchange:
        """Starts averaging a message, and comparing anchors."""
        began = self.network.now()
        if not group:
            return Exchange(began, Finished(Result(offer.message, (), Outcome.SAT_OUT, LEFT_OVER), began))
        message = self._weights[sync.index].fragment.message(offer.message)
        columns, key = self.columns.of(group, message.names), self._round_key(sync.index, sync.rounds)
        meetings = [Meeting(column.network, group, column.key(key), sync.rounds) for column in columns]
        try:
            meetings = self._weighed(sync, offer.fault, meetings, group)
        except PeerLostError as error:
            lost = Result(offer.message, group, Outcome.PEER_LOST, str(error), missing=error.ranks)
            return Exchange(began, Finished(lost, began))
        averaging, apart = self._averagings[sync.index], sync.lost or sync.met not in ((), group)
        compare = partial(self._compare, sync.index, apart)
        start = partial(start_columns, message, group, columns, meetings, compare, averaging, self.network.now)
        return started(start, message, self.side if sync.delay_steps else None, self.network, began)

    def _weighed(self, sync: Sync[Tensor], fault: str, meetings: list[Meeting], group: Group) -> list[Meeting]:
        """The meetings of a round, with messages' weights. Raises PeerLostError, also for members that do not come."""
        self.departures.check(group, sync.index, sync.rounds)
        if self._options["weighting"] != "steps":
            return meetings
        with self.departures.watched(group, sync.index, sync.rounds):
            return weighed(meetings, 0.0 if fault else float(sync.trained), self.deadline_s)

    def _compare(self, fragment: int, apart: bool, column: Column, meeting: Meeting) -> Compared:
        """Starts comparing the anchors of a column with the group's, where they should be equal."""
        if not self._compares(meeting.group):
            return None
        anchor = self._weights[fragment].fragment.message(self.anchors[fragment]).part(column.cells).flat
        # In an eager merge each anchor has the own last part in it; then only rounds that were lost count.
        own = sketch(anchor[:0] if self.method.merge.eager else anchor, apart)
        return column.network.exchange(own, meeting.group, f"{meeting.key}, anchors")

    def _compares(self, group: Group) -> bool:
        return self.method.topology.identical and len(group) > 1

    def _round_key(self, fragment: int, round: int) -> str:
        return f"round {round} of {self._name}, fragment {fragment}"

    def _apply(self, pending: PendingRound[Tensor, Exchange], starts: bool) -> None:
        """Makes a new anchor of a round's mean, and merges it; `starts` says whether the next round starts now."""
        sync, waited_from = self._rounds.syncs[pending.fragment], self.network.now()
        try:
            result = self._result(pending)
            if pending.offer.fault:
                result.lacks_progress(pending.offer.fault)
            self._settle(sync, pending, result)
            applied_at = self.network.now()
            effective_rank, share = self._adapt(sync, result)
            if pending.delayed:  # applying may hide what is not finite
                self._replica.restore_if_spoilt([pending, *self._rounds.pending])
            if result.group or pending.offer.applied:
                self._absorb(sync, pending, result, starts)
        except BaseException:  # as when a user interrupts a wait, and goes on
            sync.lost = True
            raise
        sync.ended(pending, bool(result.group), result.outcome == Outcome.PEER_LOST)
        self._along.after(sync, self._weights[sync.index], pending.round, result)
        self.departures.passes(pending.fragment, pending.round)
        self.report(
            Round(
                **facts_of(pending, result),
                step=self.step,
                waited_from=waited_from,
                landed=applied_at,
                effective_rank=effective_rank,
                share=share,
                every=sync.every_steps if self.method.adapt else None,
            )
        )

    def _result(self, pending: PendingRound[Tensor, Exchange]) -> Result:
        """What an exchange came to: the mean, or this replica's own message if a peer is lost."""
        try:
            with self.departures.watched(pending.group, pending.fragment, pending.round):
                result = pending.exchange.result.wait(self.deadline_s)
        except PeerLostError as lost:
            # A copy: a peer that is only late may still be writing its values into the message.
            result = Result(
                pending.offer.message.clone(), pending.group, Outcome.PEER_LOST, str(lost), missing=lost.ranks
            )
        result.compression_error = result.compression_error or pending.exchange.compression_error
        return result

    def _settle(self, sync: Sync[Tensor], pending: PendingRound[Tensor, Exchange], result: Result) -> None:
        """Makes anchors, outer momentum and schedule equal again in a group that was found to hold different ones."""
        group, key = pending.group, self._round_key(pending.fragment, pending.round)
        fragment, pace = self._weights[sync.index].fragment, self._paces[sync.index].told()
        columns = self.columns.of(group, fragment.names)
        if not result.apart:
            if result.outcome == Outcome.PEER_LOST and self._compares(group):
                for column in columns:
                    stay_away(column.network, group, column.key(key))
            return
        kept = {name: fragment.message(values) for name, values in self._weights[sync.index].alike().items()}
        try:
            for column in (one for one in columns if one.name in result.apart):
                parts = {name: message.part(column.cells) for name, message in kept.items()}
                own = {name: part.flat for name, part in parts.items()}
                with self.departures.watched(group, sync.index, pending.round):
                    pace = draw_together(own, pace, column.network, group, column.key(key), self.deadline_s)
                for name, part in parts.items():
                    kept[name].put(part)
        except PeerLostError as lost:
            result.note(Outcome.PEER_LOST, str(lost))  # the next round tries again
            return
        self._paces[sync.index].keep(pace)
        sync.lost = False
        if pending.offer.own is not None:
            pending.offer.own.copy_(result.mean)  # what is left of the own part in the anchors' mean

    def _adapt(self, sync: Sync[Tensor], result: Result) -> tuple[float | None, float | None]:
        """Adapts the codec's share and the steps between rounds to the effective rank.

        Steps may only adapt to means that all replicas have seen, so a round that one may have missed is left out.
        """
        adaptation, weights = self._paces[sync.index].adaptation, self._weights[sync.index]
        if adaptation is None or not result.group:
            return None, None
        cells = weights.fragment.message(gradient_of(self.outer, weights.anchor, result.mean)).cells
        own = (*effective_ranks(chain.from_iterable(cells.values())), result.outcome == Outcome.PEER_LOST)
        total, size, lost = self.trained.layout.total(torch.tensor(own, dtype=torch.float64)).tolist()
        everyone = self.holders.of(sync.index, self.method.schedule, self._everyone)
        if adaptation.settings.steps and (lost or result.group != everyone):
            return None, None
        share = adaptation.observe(rank := total / size if size else 0.0)
        self._averagings[sync.index].set_budget(share)
        if adaptation.settings.steps:
            sync.shorten(share)
        return rank, share

    def _absorb(
        self, sync: Sync[Tensor], pending: PendingRound[Tensor, Exchange], result: Result, starts: bool
    ) -> None:
        """Makes new weights of a mean; an eager merge makes the next round's offer before that, if it `starts` now."""
        if pending.offer.own is not None and starts and (group := self._group(sync)):
            sync.offer_before_applying(self._fault(sync), len(group))
        if not sync.absorb(pending, result.mean):
            result.note(Outcome.PEER_LOST, "the mean of the messages is not finite")
        if self._options["buffers"] == "round" and pending.fragment == 0:
            self.averages.buffers_after(pending.round, result)

    def _begin(self) -> None:
        self._replica.begin()

    def _starts_from(self) -> list[Message]:
        return [weights.fragment.message(weights.anchor) for weights in self._weights]

    def writing_weights(self) -> AbstractContextManager[None]:
        """See Session."""
        return self.copies.following()

    def _next_rounds(self) -> list[int]:
        return [sync.rounds for sync in self._rounds.syncs]

    def _settle_at_end(self) -> None:
        if fault := self._replica.settle(self.step, self.step, self._rounds.pending):
            log.warning("replica %d ends with the weights of its last round: %s", self.network.rank, fault)

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply_pending(self) -> None:
        """See Session."""
        super().apply_pending()
        if self._rounds.pending and self._loads.changed():
            warnings.warn(LATE_LOAD, stacklevel=4)
        while self._rounds.pending:
            self._apply(self._rounds.pending.pop(0), starts=False)
        for sync, weights in zip(self._rounds.syncs, self._weights, strict=True):
            self._along.finish(sync, weights)

    def state_dict(self) -> dict[str, Any]:
        """Anchors, outer optimizer, the codecs' state, and pending rounds; their means are waited for, not applied."""
        self._hold()
        pending = [packed(pending, self.network.now()) for pending in self._rounds.pending]
        return {
            **super().state_dict(),
            **self._replica.state_dict(),
            "groups": self.outer.state_dict()["param_groups"],
            "fragments": [paced(*each) for each in zip(self._paces, self._weights, strict=True)],
            "pending": [told for told, _ in pending],
            "clock": self._clock.elapsed_s if self._clock else None,
            "cells": dict(self._cells([tensors for _, tensors in pending])),
        }

    def _cells_here(self) -> list[Cell]:
        return [cell for weights in self._weights for cell in weights.fragment.cells]

    def _cells(self, pending: list[dict[str, Tensor]]) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is kept of each cell, also in pending rounds, by its name."""
        of = [round.fragment for round in self._rounds.pending]
        for index, (weights, averaging) in enumerate(zip(self._weights, self._averagings, strict=True)):
            own = {place: tensors for place, tensors in enumerate(pending) if of[place] == index}
            yield from cells_kept(weights, averaging.state_dict(), own)

    def _hold(self) -> None:
        """Waits for what is under way, which else would still change what codecs remember; it is not applied."""
        for pending in self._rounds.pending:
            exchange, result = pending.exchange, self._result(pending)
            exchange.result = Finished(result, exchange.result.finished_at)
        for sync, weights in zip(self._rounds.syncs, self._weights, strict=True):
            self._along.hold(sync, weights)

    @torch.no_grad()
    def _load(self, state: dict[str, Any]) -> None:
        self._hold()
        super()._load(state)
        self._replica.load_state_dict(state)
        load_into(self.outer, {"state": {}, "param_groups": state["groups"]})
        if self._clock:
            self._clock.set(state["clock"])
        pending: dict[int, dict[str, Tensor]] = {}
        for sync, saved, weights in zip(self._rounds.syncs, state["fragments"], self._weights, strict=True):
            told = {n: one["tensors"] for n, one in enumerate(state["pending"]) if one["fragment"] == sync.index}
            codecs, own = take_cells(weights, state["cells"], told)
            pending |= own
            weights.take_notes(saved.get("noted", {}))  # earlier releases tell of none
            self._along.loads(sync)
            self._averagings[sync.index].load_state_dict(codecs)
            self._paces[sync.index].keep(saved)
            sync.load_state_dict(saved["sync"])
        now, saved_rounds = self.network.now(), enumerate(state["pending"])
        self._rounds.pending = [unpacked(told, pending[place], now) for place, told in saved_rounds]
