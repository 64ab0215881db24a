"""Gossip in which each replica's own movement carries on, while the group's differences are averaged away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from farflung.outer.optimizers import OuterOptimizer


class GossipDrift(OuterOptimizer):
    """GASLoC's step (arXiv 2606.11081), for small random groups.

        y = φ + β·(θ - φ);   φ ← y - γ·(y - mean(y)) + α·(y - y of the round before)

    β is lr, α momentum, γ gamma. y - mean(y) is what the Laplacian of a round's graph makes of y: of a pair, half the
    difference. y is what travels; this replica's own is kept until the round lands.
    """

    sends_weights = True
    notes_messages = True

    def __init__(self, anchors: Iterable[Tensor], lr: float = 0.7, momentum: float = 0.5, gamma: float = 1.0) -> None:
        super().__init__(anchors, {"lr": lr, "momentum": momentum, "gamma": gamma})

    def message(self, anchor: Tensor, weights: Tensor) -> Tensor:
        """y, in the memory of the weights."""
        torch.lerp(anchor, weights, self.param_groups[0]["lr"], out=weights)
        self.state[anchor]["sent"] = weights.clone()
        return weights

    def step_with(self, anchor: Tensor, mean: Tensor) -> None:
        """φ ← y - γ·(y - mean) + α·(y - y of the round before)."""
        group, state = self.param_groups[0], self.state[anchor]
        sent = state["sent"]
        torch.lerp(sent, mean, group["gamma"], out=anchor)
        if "before" in state:
            anchor.add_(sent - state["before"], alpha=group["momentum"])
        state["before"] = sent

    def gradient(self, anchor: Tensor, mean: Tensor) -> Tensor:
        """φ - mean(y)."""
        return anchor - mean
