"""What a model saves for its backward pass, counted without memory: by hooks, under torch's fake tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from farflung.memory.measure import storage_id
from farflung.planner.architecture import Architecture, modules_of
from farflung.workloads import models

AS_LLAMA = {"float32": 84, "bfloat16": 56}
"""Bytes that a layer saves for each token and hidden number, where what experts save depends on the data."""


@dataclass(frozen=True)
class Counted:
    """Bytes that one microbatch saves: in each layer, and its input alone, which all save too."""

    layers: tuple[int, ...]
    input: int


def counted(model: Architecture, sequences: int, length: int, precision: str) -> Counted:
    """What each layer saves of so many sequences; under bfloat16 with the copies of its weights. Counted once each."""
    shape = sequences, length, precision
    found: Counted | None = model.saved.get(shape)
    if found is None:
        numbers = sequences * length * model.hidden
        try:
            layers = _layers(model.outline, sequences, length, precision)
        except RuntimeError:
            layers = (numbers * AS_LLAMA[precision],) * len(model.layers)
        found = model.saved[shape] = Counted(layers, numbers * torch.float32.itemsize)
    return found


def _layers(outline: Any, sequences: int, length: int, precision: str) -> tuple[int, ...]:
    model = copy.deepcopy(outline)
    with _silent(), FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        layers, _, _ = modules_of("", model)
        counting = _Counting(model, len(layers))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: counting.within(number))
            layer.register_forward_hook(lambda *_: counting.within(None))
        tokens = torch.zeros((sequences, length), dtype=torch.long)
        with counting, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            models.sequence_loss(model, tokens)
    return tuple(counting.bytes)


class _Counting(saved_tensors_hooks):
    """Counts what is saved within each layer, each storage once, weights not."""

    def __init__(self, model: Any, layers: int) -> None:
        self.bytes = [0] * layers
        self._layer: int | None = None
        self._seen = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(self._pack, lambda saved: saved)

    def within(self, layer: int | None) -> None:
        """Counts for another layer from now on, or for none."""
        self._layer = layer

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_id(tensor)
        if key not in self._seen:
            self._seen.add(key)
            if self._layer is not None:
                self.bytes[self._layer] += tensor.untyped_storage().nbytes()
        return tensor


@contextmanager
def _silent() -> Iterator[None]:
    """Without the pages that torch logs where an operation does not work under fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
