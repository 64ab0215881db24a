"""Replicas that train parts of one model, each with all of it in memory and a mask: for ways that farflung lacks.

A unit's holders train it. Where the forward pass is masked, too, a replica computes without others' units, as the
narrow models of `ist` do; else it computes with all of them, and only what it may change is masked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from farflung.inner import ADAMW
from farflung.settings import InnerSettings
from farflung.subnets.assembling import scale_best
from farflung.subnets.units import Pool
from farflung.training.learning_rate import lr_scale

Masks = dict[str, Tensor]
"""Ones where a replica trains, by parameter; none for what all replicas do."""


@dataclass(frozen=True)
class Way:
    """How many replicas hold each unit, and whether a replica computes without the units that it does not hold."""

    holders: int = 1
    forward_masked: bool = True


def deal(pool: Pool, replicas: int, holders: int, chance: Random) -> list[list[int]]:
    """The units of each replica: each unit has so many holders, and each replica as many units as another."""
    order = chance.sample(range(pool.units), pool.units)
    return [
        [unit for place, unit in enumerate(order) if (replica - place) % replicas < holders]
        for replica in range(replicas)
    ]


def masks_of(weights: Mapping[str, Tensor], pools: Sequence[Pool], replicas: int, way: Way, seed: int) -> list[Masks]:
    """One deal: each replica's masks."""
    found: list[Masks] = [{} for _ in range(replicas)]
    chance = Random(seed)
    for pool in pools:
        for masks, units in zip(found, deal(pool, replicas, way.holders, chance), strict=True):
            for name, cut in pool.cuts.items():
                mask = torch.zeros_like(weights[name])
                places = [(unit - cut.first) * cut.size + one for unit in units for one in range(cut.size)]
                masks[name] = mask.index_fill(cut.dim, torch.tensor(places), 1.0)
    return found


class Replica:
    """One that trains what its masks let it."""

    def __init__(self, model: Any, inner: InnerSettings, steps: int) -> None:
        self.model = model
        self.weights = dict(model.named_parameters())
        self._inner, self._steps = inner, steps
        self._optimizer = ADAMW.make(model.named_parameters(), lr=ADAMW.lr, weight_decay=inner.weight_decay)
        self.masks: Masks = {}

    @torch.no_grad()
    def begin(self, whole: Mapping[str, Tensor], masks: Masks, way: Way) -> None:
        """Takes the whole model, and other masks; the optimizer's state of what is dealt starts anew."""
        self.masks = masks
        for name, weight in self.weights.items():
            weight.copy_(whole[name])
            if name in masks:
                weight.mul_(masks[name] if way.forward_masked else 1)
                self._optimizer.state.pop(weight, None)

    def step(self, number: int, loss: Tensor) -> None:
        """One inner step, by a loss of this replica's model."""
        loss.backward()
        before = {name: self.weights[name].detach().clone() for name in self.masks}
        for name, mask in self.masks.items():
            self.weights[name].grad.mul_(mask)
        for group in self._optimizer.param_groups:
            group["lr"] = ADAMW.lr * lr_scale(self._inner, number, self._steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, mask in self.masks.items():
                self.weights[name].copy_(torch.where(mask.bool(), self.weights[name], before[name]))


@torch.no_grad()
def merged(replicas: Sequence[Replica]) -> dict[str, Tensor]:
    """The whole model: each unit's mean over its holders, and the rest's over all."""
    found = {}
    for name in replicas[0].weights:
        masks = [one.masks.get(name, torch.ones(())) for one in replicas]
        total = sum(one.weights[name] * mask for one, mask in zip(replicas, masks, strict=True))
        found[name] = total / sum(masks)
    return found


def train(
    model: Any,
    pools: Sequence[Pool],
    way: Way,
    shape: tuple[int, int, int],
    loss: Callable[[Any, int, int], Tensor],
    judge: Callable[[Any], float],
    seed: int,
) -> tuple[float, float]:
    """The loss of what was trained, and the scale of its branches.

    Args:
        model: which all begin with, and which holds the outcome.
        shape: replicas, inner steps, and steps between deals.
        loss: of a model on what a replica's step has.
        judge: the loss on what is held out.
    """
    count, steps, every = shape
    inner, whole = InnerSettings(), dict(model.named_parameters())
    replicas = [Replica(copy.deepcopy(model), inner, steps) for _ in range(count)]
    for step in range(steps):
        if step % every == 0:
            if step:
                whole = merged(replicas)
            for one, masks in zip(replicas, masks_of(whole, pools, count, way, seed * steps + step), strict=True):
                one.begin(whole, masks, way)
        for number, one in enumerate(replicas):
            one.step(step, loss(one.model, number, step))
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in merged(replicas).items():
            weights[name].copy_(values)
    scale = 1.0
    if way.forward_masked:
        scale = scale_best(weights, pools, count // way.holders, lambda: judge(model))
    return judge(model), scale
