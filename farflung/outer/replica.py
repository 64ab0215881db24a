"""One replica's weights, fast and slow: what it offers in a round, and what becomes of a mean. No network, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.outer.copies import Copies
from farflung.outer.fragments import sendable
from farflung.outer.merges import Merge
from farflung.outer.optimizers import OuterOptimizer, message_of, step_with
from farflung.outer.streams import Flight, Offer, Stream
from farflung.outer.trained import Trained
from farflung.outer.untrained import Untrained


class Replica:
    """What a replica trains, its anchors, and the outer optimizer.

    Args:
        trained: the parameters, and the inner optimizers that step them.
        untrained: what is taken back with the weights when training was spoilt.
        streams: the fragments.
        outer: the outer optimizer of their anchors.
        merge: what becomes of the steps that are trained while a round is under way.
        device: where the outer state lives; None is with the model.
    """

    def __init__(
        self,
        trained: Trained,
        untrained: Untrained,
        streams: Sequence[Stream],
        outer: torch.optim.Optimizer,
        merge: Merge,
        device: torch.device | None,
    ) -> None:
        self._streams = streams
        self._outer = outer
        self._merge = merge
        self._device = device
        self._trained = trained
        self._untrained = untrained
        fragments = [stream.fragment.parameters for stream in streams]
        self.copies = Copies(trained.optimizers, fragments if any(fragments) else [trained.parameters])

    def begin(self) -> None:
        """Takes the weights, as they are now, for anchors."""
        for stream in self._streams:
            stream.anchor.copy_(stream.fragment.read())
        self.copies.begin()

    def fault(self) -> str:
        """What is wrong when a weight is NaN or infinite, of any fragment, or ""."""
        return "" if all(stream.fragment.sound() for stream in self._streams) else "the weights are not finite"

    def take_anchor(self, stream: Stream) -> None:
        """Gives a fragment's weights the values of its anchor."""
        self._write(stream, stream.anchor)

    def offer(self, stream: Stream, fault: str) -> Offer:
        """What to send of a fragment: its progress; with a fault, its anchor, which stands for none."""
        if fault:
            self.take_anchor(stream)
        else:
            self._untrained.keep()
        weights = stream.anchor.clone() if fault else stream.fragment.read(self._device)
        keeps_anchor = self._merge.eager and isinstance(self._outer, OuterOptimizer)
        anchor = stream.anchor.clone() if keeps_anchor else None
        return Offer(message_of(self._outer, stream.anchor, weights), fault, anchor)

    def nothing(self, anchor: Tensor) -> Tensor:
        """The message of a replica that has made no progress."""
        return message_of(self._outer, anchor, anchor.clone())

    def kept_until_landing(self, stream: Stream, message: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Copies of the weights at a round's start and of the own message, where the merge needs them."""
        at_start = stream.fragment.read(self._device) if self._merge.needs_start and stream.delay else None
        return at_start, message.clone() if self._merge.eager else None

    def step_alone(self, stream: Stream, offer: Offer, members: int) -> None:
        """The first step of an eager merge, before any exchange: the others count as without progress."""
        offer.applied = 1 / members
        step_with(self._outer, stream.anchor, self.nothing(stream.anchor).lerp_(offer.message, offer.applied))
        self._write(stream, stream.anchor)

    def absorb(self, stream: Stream, flight: Flight, mean: Tensor, fresh: Offer | None) -> None:
        """Gives a mean to the outer optimizer, and the new anchor to the weights. The mean's memory is used up.

        `fresh` is what an eager merge has made of the weights just before, if another round starts now. Without it,
        they keep what was trained meanwhile.
        """
        at_start = flight.at_start
        if flight.own is not None:
            self._refresh(mean, flight, fresh, stream.anchor)
            at_start = None if fresh else stream.anchor.clone()
        if sendable(mean):
            step_with(self._outer, stream.anchor, mean)
        else:
            flight.note("peer lost", "the mean of the messages is not finite")
        merged = stream.anchor
        if flight.lands_at > flight.started_step:
            now = stream.fragment.read(out=mean[: stream.fragment.numel])
            merged = self._merge.merge(now, at_start, stream.anchor)
        self._write(stream, merged)

    def restore(self, flights: Sequence[Flight]) -> None:
        """Takes all weights back to the anchors, and drops what may be spoilt, too: the inner optimizers' moments."""
        for stream in self._streams:
            stream.fragment.write(stream.anchor)
        for flight in flights:
            if flight.at_start is not None:
                flight.at_start.copy_(self._streams[flight.fragment].anchor)
        self.copies.put_back()
        self._untrained.restore()
        for parameter in self._trained.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()  # or a step that is still to come would spoil all again

    def _refresh(self, mean: Tensor, flight: Flight, fresh: Offer | None, anchor: Tensor) -> None:
        """Makes of a round's mean what an eager merge steps with: the group's last messages, but its own fresh one.

        Of the last own one, what was applied is taken back; of the fresh one, what the next group will make of it is
        applied. The others' count as if from the anchor of now.
        """
        assert flight.own is not None
        mean.sub_(flight.own, alpha=flight.applied)
        if fresh:
            mean.add_(fresh.message, alpha=fresh.applied)
        if flight.anchor is not None:
            mean.add_(self.nothing(anchor), alpha=1 - (fresh.applied if fresh else 0.0))
            mean.sub_(self.nothing(flight.anchor), alpha=1 - flight.applied)

    def _write(self, stream: Stream, weights: Tensor) -> None:
        with self.copies.following(stream.index):
            stream.fragment.write(weights)
