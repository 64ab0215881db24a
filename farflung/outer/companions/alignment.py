"""The last round's mean step, told to inner optimizers, whose steps follow it in part."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.shards import own_of
from farflung.inner import MEAN_STEP
from farflung.joint.maps import maps_of
from farflung.outer.companions.base import Added, Along

if TYPE_CHECKING:
    from farflung.cells import Cell
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.method import Method
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync

BEFORE = "anchor before the round"
"""What an anchor as it was when its round started is noted as."""
STEPS = "steps before the round"
"""And the inner steps since the last round in which it moved."""


NOBODY_FOLLOWS = (
    "AlignedSteps tells optimizers the mean step, and none that is attached has an align above 0, so nothing follows; "
    "give attach farflung.inner.MuonAdamW with align=0.5, say, or leave AlignedSteps out"
)

CORED = (
    "muon_align divides what a round has moved by the steps behind it, and in some of these a model's core is trained "
    "without its rest; leave out muon_align (AlignedSteps), or core"
)


@dataclass(frozen=True)
class AlignedSteps:
    """Tells inner optimizers where all replicas went in the last round (FedMuon, arXiv 2510.27403); sends nothing.

    That is how far the anchor moved, divided by the steps behind it and the learning rate. Optimizers follow it whose
    groups have an `align` above 0: Muon. Who sits out a round goes on with what the one before has told. Who takes the
    state of others learns of it in the first round that it trains for from start to end.
    """

    sends_more = False

    def added(self, method: Method, cells: Sequence[Cell]) -> Added | None:
        """See Companion: nothing."""
        return None

    def along(self, loop: OuterLoop) -> Along:
        """See Companion; says so where nobody would follow. Raises UserError for a model with a core."""
        if maps_of(loop.trained.model):
            raise UserError(CORED)
        groups = [group for optimizer in loop.trained.optimizers for group in optimizer.param_groups]
        if not any(group.get("align") for group in groups):
            warnings.warn(NOBODY_FOLLOWS, stacklevel=5)
        return Aligning(loop)


class Aligning(Along):
    """One loop's mean steps."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        self._in_part: set[int] = set()
        """The fragments whose next round this replica trains for only in part."""

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Notes where the anchor is."""
        noted = weights.noted
        if sync.index in self._in_part:
            self._in_part.remove(sync.index)
            return
        noted[BEFORE], noted[STEPS] = weights.anchor.clone(), sync.trained

    def after(self, sync: Sync[Tensor], weights: Weights, round: int, result: Result) -> None:
        """Tells by how much it has moved, for each step and unit of learning rate."""
        fragment, noted = weights.fragment, weights.noted
        before = noted.pop(BEFORE, None)
        if before is None or not result.group:
            return
        mean = torch.sub(before, weights.anchor).div_(max(1, noted.pop(STEPS)))
        steps = {name: torch.zeros_like(own_of(one.detach())) for name, one in fragment.named.items()}
        fragment.keeper.scatter(mean, steps)
        named = {parameter: steps[name] for name, parameter in fragment.named.items()}
        for optimizer in self._loop.trained.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if group.get("align") and group["lr"] and parameter in named:
                        optimizer.state[parameter][MEAN_STEP] = named[parameter].div_(group["lr"])

    def taken(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along; of the round that goes on now, this replica does only a part of the steps."""
        for name in (BEFORE, STEPS):
            weights.noted.pop(name, None)
        self._in_part.add(sync.index)

    def loads(self, sync: Sync[Tensor]) -> None:
        """See Along; a round that a state goes on with, this replica does from start to end."""
        self._in_part.discard(sync.index)
