"""All of one replica's weights together: whether they are sound, and how they go back to the last round's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from farflung.hooks.copies import Copies
from farflung.hooks.layouts import first_told
from farflung.hooks.trained import Trained
from farflung.hooks.untrained import Untrained
from farflung.outer.faults import Faults
from farflung.outer.fragments import Weights
from farflung.outer.round import PendingRound

Pending = PendingRound[Tensor, Any]


class Replica:
    """What a replica trains, fragment by fragment, and what changes with it."""

    def __init__(
        self, weights: Sequence[Weights], trained: Trained, untrained: Untrained, copies: Copies, faults: Faults
    ) -> None:
        self.copies = copies
        self.faults = faults
        self._weights = weights
        self._trained = trained
        self._untrained = untrained
        self._spoilt: tuple[int, str] = (-1, "")

    def begin(self) -> None:
        """Makes the present weights the anchors."""
        for weights in self._weights:
            weights.anchor.copy_(weights.fragment.read())
        self.copies.begin()

    def fault(self, round: int, step: int, pending: Sequence[Pending]) -> str:
        """Why a round that starts now has no progress to offer, or "".

        Where training was spoilt, the whole replica goes back to its anchors, and all fragments of the round offer no
        progress. So NaN is never sent, and no partner waits in vain.
        """
        if fault := self.settle(round, step, pending):
            self._spoilt = (round, fault)
            self._trained.restore_beside()  # else what is wrong there would come back from there
        fault = self._spoilt[1] if round <= self._spoilt[0] else ""
        if not fault:
            self._untrained.keep()
        return fault

    def restore_if_spoilt(self, pending: Sequence[Pending]) -> None:
        """Goes back to the anchors at once where weights are not finite; the next round says so."""
        if fault := first_told(self._trained.layout, self._unsound()):
            self.faults.spoil(fault)
            self.restore(pending)

    def settle(self, round: int, step: int, pending: Sequence[Pending]) -> str:
        """Goes back to the anchors if the steps before a round were spoilt; says why, or ""."""
        self.faults.spoil(self._unsound())
        if fault := self.faults.judge(round, step):
            self.restore(pending)
        return fault

    def restore(self, pending: Sequence[Pending]) -> None:
        """Takes all weights back to the anchors, and drops what may be spoilt, too: the inner optimizers' moments.

        What pending rounds have kept of the weights is spoilt as well.
        """
        for weights in self._weights:
            weights.fragment.write(weights.anchor)
        for round in pending:
            if round.offer.at_start is not None:
                round.offer.at_start.copy_(self._weights[round.fragment].anchor)
        self.copies.put_back()
        self._untrained.restore()
        for parameter in self._trained.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()  # or a step that is still to come would spoil all again

    def _unsound(self) -> str:
        """What this process finds: all of a replica's go back together."""
        return "" if all(weights.fragment.sound() for weights in self._weights) else "the weights are not finite"

    def state_dict(self) -> dict[str, Any]:
        """What is known of copies, and the last round that was spoilt."""
        return {"spoilt": self._spoilt, "copies": self.copies.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._spoilt = state["spoilt"]
        self.copies.load_state_dict(state["copies"])
