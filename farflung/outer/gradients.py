"""Averaging of gradients before every inner step: synchronous data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farflung.cells import Cell
from farflung.hooks.buffers import average
from farflung.hooks.digests import digest
from farflung.hooks.shards import own_of
from farflung.hooks.start import SETTING, Fact
from farflung.hooks.steps import hook_steps
from farflung.outer.columns import Message
from farflung.outer.mean_gradient import MeanGradient
from farflung.outer.session import Session
from farflung.outer.setup import Setup

if TYPE_CHECKING:
    from farflung.memory.updates import FarUpdates


class GradientLoop(Session):
    """Replaces each inner optimizer's gradients by the mean of all replicas' gradients.

    A replica without a sound gradient counts as zero. A parameter that has a gradient nowhere gets none. Where a
    GradScaler finds an overflow on one replica, all of them skip the step. Each call of a closure is an exchange of
    its own, and returns the mean loss. A peer that is lost ends the run, with PeerLostError: replicas that go on from
    different gradients would no longer be one model. Where gradients are far, some layers may have taken the step then.

    The optimizers may step in any order that is the same on all replicas; a step of the last one counts. A round's
    fragment is the optimizer's place in the list.

    Raises UserError for what it could not be right with; and out of `optimizer.step()`:
        DisagreementError: at the first step, if replicas start from different weights.
        DivergedError: after three exchanges in a row of an optimizer in which this replica's gradients were not finite.
        UserError: if others than the given optimizers train the model, or what is trained has changed.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._in_blocks = False
        self._means = [MeanGradient(self, optimizer, index) for index, optimizer in enumerate(setup.optimizers)]
        self.undo.callback(hook_steps(setup.optimizers[-1], after=self._after_inner_step))

    def gradients_from(self, far: Callable[[], FarUpdates | None]) -> None:
        """See Session."""
        self._in_blocks = True
        for mean in self._means:
            mean.in_blocks(far)

    def _facts(self) -> list[Fact]:
        facts = super()._facts()
        if self._in_blocks:  # which is no choice of the run, as another plan of memory may have whole ones
            place = next(number for number, fact in enumerate(facts) if fact.what == "way of averaging")
            facts[place] = Fact(facts[place].what, (f"{facts[place].told[0]}, in blocks for --memory",), SETTING)
        return facts

    def _after_inner_step(self) -> None:
        self.step += 1
        if self.step & (self.step - 1) == 0:  # at 1, 2, 4, 8 …, since looking takes time
            self.untrained.look()
            self._look_beside()
        if self._options["buffers"] == "round":
            key, everyone = self.key(f"buffers, step {self.step}"), self.network.members()
            average(self.averaged_besides(), self.network, everyone, key, self.deadline_s, directions=True)

    def _look_beside(self) -> None:
        """Parameters without an optimizer may change, as a teacher does, but equally on all replicas."""
        if not (beside := self.trained.left_alone()):
            return
        own = digest(map(own_of, beside)).view(torch.uint8)
        key = self.key(f"beside, step {self.step}")
        packets = self.network.exchange(own, self.network.members(), key).wait(self.deadline_s)
        if any(not torch.equal(packet.cpu(), own) for packet in packets.values()):
            self.trained.check_left_alone()

    def spoil(self, reason: str) -> None:
        """See Session: each optimizer's next gradients are withheld."""
        for mean in self._means:
            mean.faults.spoil(reason)

    def state_dict(self) -> dict[str, Any]:
        """What each optimizer's codec remembers, besides."""
        optimizers = [mean.state_dict() for mean in self._means]
        cells = {name: kept for mean in self._means for name, kept in mean.cells().items()}
        return {**super().state_dict(), "optimizers": optimizers, "cells": cells}

    def _cells_here(self) -> list[Cell]:
        return [cell for mean in self._means for cell in mean.fragment.cells]

    def _next_rounds(self) -> list[int]:
        return [mean.next_round for mean in self._means]

    def _starts_from(self) -> list[Message]:
        return [mean.weights(copied=not self._in_blocks) for mean in self._means]

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        for mean, saved in zip(self._means, state["optimizers"], strict=True):
            mean.load_state_dict(saved, state["cells"])
