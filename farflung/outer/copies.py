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

PUT_BACK = 0.1
"""Weights were put back if they are so much nearer to where they were than to what a round has made of them."""

SAMPLED = 256
"""Values of each parameter by which that is judged."""

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
            now = {parameter: _sample(parameter) for parameter in after}
            from_old, from_new, apart = _distance(now, before), _distance(now, after), _distance(before, after)
            if from_old < PUT_BACK * from_new:
                raise UserError(
                    f"{type(optimizer).__name__} keeps weights of its own and puts them back over what a round has "
                    "made of the model's; use an optimizer that works on the model's parameters, or that keeps its "
                    "copies in its state"
                )
            if from_new < apart / 2:
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


def _distance(one: Values, other: Values) -> float:
    return math.hypot(*(float((one[parameter] - other[parameter]).norm()) for parameter in one))
