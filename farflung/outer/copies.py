"""Weights that inner optimizers keep besides the model's: schedule-free averages, float32 masters of half precision.

A round changes the model's weights under the optimizer's hands. Copies in the optimizer's state move along with them.
An optimizer that keeps copies out of sight puts the old weights back, and is found out by that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.config import UserError
from farflung.outer.trained import held_by

NEAR = 0.25
"""State is a copy of the weights if the square of its distance from them is less than this part of their square."""

PUT_BACK, KEPT = 0.3, 0.7
"""A step after a round less of its change is left where weights were put back, and more where they stayed."""

CERTAIN = 0.1
"""The largest standard error of that share at which it is judged."""

SAMPLED = 256
"""Values of each parameter by which it is judged."""

Values = dict[nn.Parameter, Tensor]


class _Written(NamedTuple):
    """Samples of an optimizer's parameters, before and after a round has written them."""

    optimizer: Optimizer
    before: Values
    after: Values


class Copies:
    """The weights that some optimizers keep themselves. Torch's own keep none.

    Args:
        optimizers: the inner ones.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._strange = [optimizer for optimizer in optimizers if not _known(optimizer)]
        self._unproven = set(self._strange)
        self._names: dict[Optimizer, list[str]] = {}
        self._written: list[_Written] = []

    @torch.no_grad()
    def before_writing(self, parameters: Sequence[nn.Parameter]) -> Values:
        """What is needed of parameters that a round is about to write: their values, where copies must follow."""
        if not self._strange:
            return {}
        for optimizer in self._strange:
            if optimizer not in self._names:
                self._names[optimizer] = _copies_in(optimizer)
        return {parameter: parameter.detach().clone() for parameter in parameters}

    @torch.no_grad()
    def after_writing(self, before: Values) -> None:
        """Moves copies as far as the parameters were moved."""
        for optimizer in self._strange:
            own = [parameter for parameter in held_by(optimizer) if parameter in before]
            for parameter in own:
                for name in self._names[optimizer]:
                    if (copy := optimizer.state.get(parameter, {}).get(name)) is not None:
                        copy.add_(parameter.to(copy.dtype) - before[parameter].to(copy.dtype))
            if optimizer in self._unproven:
                was = {parameter: _sample(before[parameter]) for parameter in own}
                self._written.append(_Written(optimizer, was, {parameter: _sample(parameter) for parameter in own}))

    @torch.no_grad()
    def check(self) -> None:
        """Sees, a step later, whether weights stayed where a round has put them. Raises UserError."""
        for optimizer, before, after in self._written:
            share, error = _left(before, after)
            if error < CERTAIN and share < PUT_BACK:
                raise UserError(
                    f"{type(optimizer).__name__} keeps weights of its own and puts them back over what a round has "
                    "made of the model's; use an optimizer that works on the model's parameters, or that keeps its "
                    "copies in its state"
                )
            if error < CERTAIN and share > KEPT:
                self._unproven.discard(optimizer)
        self._written.clear()


def _known(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith(("torch.optim.", "farflung."))


def _copies_in(optimizer: Optimizer) -> list[str]:
    """The names under which the optimizer's state holds copies of its parameters."""
    square: dict[str, float] = {}
    distance: dict[str, float] = {}
    for parameter in held_by(optimizer):
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                weights = parameter.detach().float()
                square[name] = square.get(name, 0.0) + float(weights.square().sum())
                distance[name] = distance.get(name, 0.0) + float((value.float() - weights).square().sum())
    return [name for name in square if distance[name] < NEAR * square[name]]


def _sample(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:SAMPLED].clone().double()


def _left(before: Values, after: Values) -> tuple[float, float]:
    """The share of a change that is still in the parameters a step later, and its standard error.

    The slope of where they are now on where they were moved; steps of training are the noise.
    """
    moved = torch.cat([after[parameter] - before[parameter] for parameter in after])
    found = torch.cat([_sample(parameter) - before[parameter] for parameter in after])
    square = float(moved.square().sum())
    if not square:
        return 1.0, math.inf
    share = float((found * moved).sum()) / square
    return share, float((found - share * moved).norm()) / math.sqrt(square * len(moved))
