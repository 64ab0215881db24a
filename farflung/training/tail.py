"""Tail averaging: the mean of a replica's weights over the end of its run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from farflung.hooks.trained import trainable
from farflung.memory.far import Home, MakeHome, near_home


class TailAverage:
    """A running mean of weights, one sample a call.

    Keeps one float32 copy of the model from the first sample on, in homes that `home` makes. It needs no exchange.

    Args:
        model: whose weights.
        after: the last step whose weights do not count.
        home: see above.
    """

    def __init__(self, model: nn.Module, after: float = -math.inf, home: MakeHome = near_home) -> None:
        self._parameters, self._after, self._home = trainable(model), after, home
        self._mean: dict[str, Home] = {}
        self._count, self._first = 0, 0

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Counts the weights as they are now, after so many steps."""
        if step <= self._after:
            return
        self._first = self._first if self._count else step
        self._count += 1
        for name, parameter in self._parameters.items():
            if name in self._mean:
                mean = self._mean[name].tensor
                mean.lerp_(parameter.float().to(mean.device), 1 / self._count)
                self._mean[name].let_go()
            else:
                self._put(name, parameter.detach())

    @torch.no_grad()
    def apply(self) -> None:
        """Gives the model the mean, if there is one."""
        for name, mean in self._mean.items():
            self._parameters[name].copy_(mean.tensor)

    def state_dict(self) -> dict[str, Any]:
        """The mean so far, by the parameters' names, and its first step."""
        return {
            "count": self._count,
            "first": self._first,
            "mean": {name: mean.tensor for name, mean in self._mean.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`; it begins anew where that has weights which do not count any more."""
        self._count, self._first, self._mean = 0, 0, {}
        if state.get("first", math.inf) <= self._after:  # the run has become longer; earlier releases tell of no step
            return
        self._count, self._first = state["count"], state.get("first", 0)
        for name, mean in state["mean"].items():
            self._put(name, mean.to(self._parameters[name].device))

    def _put(self, name: str, mean: torch.Tensor) -> None:
        self._mean[name] = self._home(mean.float())
        self._mean[name].tensor.copy_(mean)
        self._mean[name].let_go()
