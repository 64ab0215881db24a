"""The whole model of what replicas have trained apart, and how strongly its branches count together.

In training each branch is computed by a replica's own units alone; all of them together add up to more. So what leads
out of them is scaled, by 1 / N to 1 among N replicas (ResIST, arXiv 2107.00961, takes 1 / N).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from farflung.subnets.units import Pool

SCALES = 4
"""Steps from 1 / N to 1 among which the scale is chosen."""


@torch.no_grad()
def assemble(weights: Mapping[str, Tensor], pools: Sequence[Pool], replicas: int) -> None:
    """Makes the whole model's units, in place, of the mean over replicas that have noughts for others' units."""
    for name in (name for pool in pools for name in pool.cuts):
        weights[name].mul_(replicas)


@torch.no_grad()
def scale_branches(weights: Mapping[str, Tensor], pools: Sequence[Pool], scale: float) -> None:
    """Scales what leads out of the units, in place."""
    for name in (name for pool in pools for name in pool.leaving):
        weights[name].mul_(scale)


@torch.no_grad()
def scale_best(
    weights: Mapping[str, Tensor], pools: Sequence[Pool], replicas: int, badness: Callable[[], float]
) -> float:
    """Scales a model's branches, in place, by what makes it least bad on held-out samples; returns that."""
    before = {name: weights[name].clone() for pool in pools for name in pool.leaving}

    def judged(scale: float) -> float:
        for name, values in before.items():
            weights[name].copy_(values)
        scale_branches(weights, pools, scale)
        return badness()

    scales: list[float] = [replicas ** (step / SCALES - 1) for step in range(SCALES + 1)]
    best = min(scales, key=judged)
    judged(best)
    return best
