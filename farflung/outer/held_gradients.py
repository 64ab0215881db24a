"""Gradients, wherever they lie: those of parameters that the host steps are far."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from farflung.codecs import finite
from farflung.hooks.shards import own_of
from farflung.outer.sparse import dense

if TYPE_CHECKING:
    from farflung.memory.updates import FarUpdates


class HeldGradients:
    """What this process has of gradients; `far` keeps those of some parameters, and steps these."""

    def __init__(self, far: FarUpdates | None = None) -> None:
        self._far = far

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has a gradient."""
        if self._far and self._far.keeps(parameter):
            return self._far.has(parameter)
        return parameter.grad is not None

    def read(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient, not to be written; noughts where there is none."""
        if not self.has(parameter):
            own = own_of(parameter)
            return own.new_zeros(1).expand_as(own)
        if self._far and self._far.keeps(parameter):
            return self._far.gradient(parameter)
        assert parameter.grad is not None
        return own_of(dense(parameter.grad))

    def room(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient, to be written; from now on it has one, which is dense."""
        if self._far and self._far.keeps(parameter):
            return self._far.gradient(parameter)
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else dense(parameter.grad)
        return own_of(parameter.grad)

    def drop(self, parameter: nn.Parameter) -> None:
        """Lets a parameter have none."""
        if self._far and self._far.keeps(parameter):
            self._far.drop(parameter)
        else:
            parameter.grad = None

    def finite(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether all values are finite, in float32, too."""
        near = [parameter.grad for parameter in parameters if parameter.grad is not None]
        values = [own_of(one) if one.layout == torch.strided else one.coalesce().values() for one in near]
        short = [one.float() if one.dtype == torch.float64 else one for one in values]
        return finite(*short) and (self._far is None or self._far.finite())

    def step(self, known: Set[nn.Parameter]) -> None:
        """Steps layers that are far, once the means of all their gradients are known."""
        if self._far:
            self._far.step(known)
