"""The last round's mean step, told to inner optimizers, whose steps follow it in part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.hooks.shards import own_of
from farflung.inner import MEAN_STEP
from farflung.outer.companions.base import Along
from farflung.outer.optimizers import state_by_anchor

if TYPE_CHECKING:
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync

BEFORE = "before the round"
"""What an anchor as it was when its round started is called among what is kept of it."""
STEPS = "steps before the round"


@dataclass(frozen=True)
class AlignedSteps:
    """Tells inner optimizers where all replicas went in the last round (FedMuon, arXiv 2510.27403); sends nothing.

    That is how far the anchor moved, divided by the round's steps and the learning rate. Optimizers follow it whose
    groups have an `align` above 0: Muon.
    """

    sends_more = False

    def along(self, loop: OuterLoop) -> Along:
        """See Companion."""
        return Aligning(loop)


class Aligning(Along):
    """One loop's mean steps."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Notes where the anchor is."""
        kept = state_by_anchor(self._loop.outer)[weights.anchor]
        kept[BEFORE], kept[STEPS] = weights.anchor.clone(), max(1, sync.trained)

    def after(self, sync: Sync[Tensor], weights: Weights, result: Result) -> None:
        """Tells by how much it has moved, for each step and unit of learning rate."""
        kept, fragment = state_by_anchor(self._loop.outer)[weights.anchor], weights.fragment
        mean = torch.sub(kept.pop(BEFORE), weights.anchor).div_(kept.pop(STEPS))
        steps = {name: torch.zeros_like(own_of(one.detach())) for name, one in fragment.named.items()}
        fragment.keeper.scatter(mean, steps)
        named = {parameter: steps[name] for name, parameter in fragment.named.items()}
        for optimizer in self._loop.trained.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if group.get("align") and group["lr"] and parameter in named:
                        optimizer.state[parameter][MEAN_STEP] = named[parameter].div_(group["lr"])
