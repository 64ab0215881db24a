"""What a model saves for its backward pass, counted without memory: by hooks, under torch's fake tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from farflung.memory.measure import Held, storage_id, tensors_in
from farflung.memory.modes import again
from farflung.planner.architecture import Architecture, modules_of
from farflung.workloads import models

AS_LLAMA = {"float32": 84, "bfloat16": 56}
"""Bytes that a layer saves for each token and hidden number, where what experts save depends on the data."""


@dataclass(frozen=True)
class Counted:
    """Bytes that one microbatch takes.

    Args:
        layers: what each saves.
        input: that alone, which all save, too.
        working: what the layer that saves most holds at most, in either pass, besides what it saves.
        spared: the part of that layer's products with weights that computing it again does without.
    """

    layers: tuple[int, ...]
    input: int
    working: int
    spared: float


def counted(model: Architecture, sequences: int, length: int, precision: str) -> Counted:
    """What each layer saves of so many sequences; under bfloat16 with the copies of its weights. Counted once each."""
    shape = sequences, length, precision
    found: Counted | None = model.saved.get(shape)
    if found is None:
        numbers = sequences * length * model.hidden
        try:
            layers, working, spared = _layers(model.outline, sequences, length, precision)
        except (RuntimeError, IndexError):  # experts, or a layer that is called with names alone
            layers, working, spared = (numbers * AS_LLAMA[precision],) * len(model.layers), 0, 0.0
        found = model.saved[shape] = Counted(layers, numbers * torch.float32.itemsize, working, spared)
    return found


def _layers(outline: Any, sequences: int, length: int, precision: str) -> tuple[tuple[int, ...], int, float]:
    model = copy.deepcopy(outline)
    with _silent(), FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        layers, _, _ = modules_of("", model)
        counting = _Counting(model, len(layers))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(
                lambda _, args, given, number=number: counting.within(number, args, given), with_kwargs=True
            )
            layer.register_forward_hook(lambda *_: counting.within(None))
        tokens = torch.zeros((sequences, length), dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            with counting:
                models.sequence_loss(model, tokens)
            saved = tuple(counting.bytes)
            number = saved.index(max(saved))
            passes = partial(_passes, layers[number], *counting.calls[number])
            with Held() as held:
                passes()
            spared = _spared(layers[number], passes)
    return saved, max(held.most - max(saved), 0), spared


def _passes(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """A layer's forward and backward pass."""
    returned = layer(args[0].detach().requires_grad_(), *args[1:], **given)
    leaving = [tensor for tensor in tensors_in(returned) if tensor.requires_grad]
    torch.autograd.backward(leaving, [*map(torch.ones_like, leaving)])


def _spared(layer: Any, passes: Callable[[], None]) -> float:
    """The part of a layer's products with weights that computing it again does without.

    Attention is not counted on processors.
    """
    with FlopCounterMode(display=False) as counter:
        forward, repeated = again(layer, counter.get_total_flops, passes)
    return 1 - repeated / forward if forward else 0.0


class _Counting(saved_tensors_hooks):
    """Counts what is saved within each layer, each storage once, weights not."""

    def __init__(self, model: Any, layers: int) -> None:
        self.bytes = [0] * layers
        self.calls: list[Any] = [None] * layers
        self._layer: int | None = None
        self._seen = {storage_id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        super().__init__(self._pack, lambda saved: saved)

    def within(self, layer: int | None, *call: Any) -> None:
        """Counts for another layer from now on, which is called so, or for none."""
        self._layer = layer
        if layer is not None:
            self.calls[layer] = call

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
