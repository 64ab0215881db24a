"""Tail averaging: the mean of a replica's weights over the end of its run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from farflung.hooks.trained import trainable


class TailAverage:
    """A running mean of weights, one sample a call: the mean of late anchors has a lower loss than the last one.

    Keeps one float32 copy of the model from the first sample on. It needs no exchange.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = trainable(model)
        self._mean: dict[str, torch.Tensor] = {}
        self._count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Counts the weights as they are now."""
        self._count += 1
        for name, parameter in self._parameters.items():
            if name in self._mean:
                self._mean[name].lerp_(parameter.float(), 1 / self._count)
            else:
                self._mean[name] = parameter.detach().float().clone()

    @torch.no_grad()
    def apply(self) -> None:
        """Gives the model the mean, if there is one."""
        for name, mean in self._mean.items():
            self._parameters[name].copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """The mean so far, by the parameters' names."""
        return {"count": self._count, "mean": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._count = state["count"]
        self._mean = {name: mean.to(self._parameters[name].device) for name, mean in state["mean"].items()}
