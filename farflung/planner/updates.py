"""What an optimizer's step of some parameters takes, counted without memory: under torch's fake tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from farflung.cells import Shape
from farflung.inner import Inner
from farflung.memory.measure import bytes_of, tensors_in

MOST_COPIES = 3
"""What any of our optimizers keeps of a parameter at most: taken for those that look at values, which are not there."""


@dataclass(frozen=True)
class Updates:
    """What one step takes.

    Args:
        values: of the parameters.
        moment_bytes: that the optimizer keeps of them.
        flops: operations in products of matrices, as Muon has them.
    """

    values: int
    moment_bytes: int
    flops: float


@lru_cache
def updates_of(inner: Inner, shapes: Sequence[Shape], in_layers: bool) -> Updates:
    """Of float32 parameters, which are a layer's or lie outside of the layers."""
    values = sum(map(math.prod, shapes))
    try:
        with FakeTensorMode(), FlopCounterMode(display=False) as counter:
            # Optimizers tell a layer's parameters by the number in their names.
            named = [("0." * in_layers + f"p{n}", nn.Parameter(torch.empty(shape))) for n, shape in enumerate(shapes)]
            optimizer = inner.make(named, lr=inner.lr, weight_decay=0.0)
            for _, parameter in named:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            moments = bytes_of(tensors_in([*optimizer.state.values()]))
            return Updates(values, moments, counter.get_total_flops())
    except RuntimeError:
        return Updates(values, MOST_COPIES * values * torch.float32.itemsize, 0.0)
