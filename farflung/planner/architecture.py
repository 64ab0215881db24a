"""What the planner knows of a model without its weights: parameters, layers, and what they compute and keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from farflung.config import Config, UserError
from farflung.pipeline.balance import load_of, spans
from farflung.planner.sizes import Shape
from farflung.workloads import models, tokenizers

VOCABULARY = 32_000
"""Tokens that the presets of published sizes are counted with; the smaller ones are for bytes."""

PUBLISHED_WIDTH = 768
"""Hidden numbers of the smallest preset of a published size."""


@dataclass(frozen=True)
class Architecture:
    """A decoder: layers that are alike, and what comes before and after them.

    Args:
        layers: how many.
        hidden: width of what passes from layer to layer.
        layer_shapes: of one layer's parameters.
        first_shapes, last_shapes: of what comes before the layers, and after.
        vocabulary: tokens that the last layer tells apart.
        tied: whether the last matrix is the first one again.
    """

    layers: int
    hidden: int
    layer_shapes: tuple[Shape, ...]
    first_shapes: tuple[Shape, ...]
    last_shapes: tuple[Shape, ...]
    vocabulary: int
    tied: bool = False

    @cached_property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return sum(map(math.prod, self.shapes))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of all parameters, tied ones once."""
        return (*self.first_shapes, *self.layer_shapes * self.layers, *self.last_shapes)

    def stage_layers(self, stages: int) -> list[int]:
        """How many layers each of so many pipeline stages has, dealt out as training does. Raises UserError."""
        layer, first, after = map(load_of, (self.layer_shapes, self.first_shapes, self.last_shapes))
        before = first._replace(work=0.0)
        if self.tied:
            after = after.plus(first)
        return [span.end - span.begin for span in spans([layer] * self.layers, before, after, stages)]

    def stage_shapes(self, stages: int) -> list[tuple[Shape, ...]]:
        """The parameters of each of so many pipeline stages. Raises UserError."""
        shapes = [self.layer_shapes * count for count in self.stage_layers(stages)]
        shapes[0] = (*self.first_shapes, *shapes[0])
        shapes[-1] = (*shapes[-1], *self.last_shapes)
        return shapes

    def flops_per_token(self, sequence_length: int) -> float:
        """Operations of a forward and a backward pass for one token: 6 a matrix parameter, and attention's own."""
        matrices = self.layers * sum(math.prod(shape) for shape in self.layer_shapes if len(shape) > 1)
        head = sum(math.prod(shape) for shape in (self.first_shapes if self.tied else self.last_shapes))
        return 6.0 * (matrices + head) + 12.0 * self.layers * self.hidden * sequence_length


def architecture_of(name: str, sequence_length: int = 1024) -> Architecture:
    """A preset, or a model that transformers can configure, built without memory for its weights. Raises UserError."""
    config = Config(model=name, sequence_length=sequence_length)
    settings = models.model_config(config, tokenizers.load("bytes"))
    if name in models.PRESETS and settings.hidden_size >= PUBLISHED_WIDTH:
        settings.vocab_size = max(settings.vocab_size, VOCABULARY)
    try:
        model = models.outline(settings)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"model {name!r} cannot be built as a causal language model: {reason}") from error
    return _architecture(name, settings, model)


def _architecture(name: str, settings: Any, model: nn.Module) -> Architecture:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(f"model {name!r} has no list of layers; the planner knows decoders of layers that are alike")
    layers = max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))
    inside = {id(parameter) for parameter in layers.parameters()}
    outside = [(key, parameter) for key, parameter in model.named_parameters() if id(parameter) not in inside]
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}  # type: ignore[operator]
    first = [p for key, p in outside if id(p) in embeddings or "embed" in key or "wpe" in key]
    firsts = {id(parameter) for parameter in first}
    last = [p for _, p in outside if id(p) not in firsts]
    return Architecture(
        layers=len(layers),
        hidden=settings.hidden_size,
        layer_shapes=tuple(tuple(p.shape) for p in layers[0].parameters()),
        first_shapes=tuple(tuple(p.shape) for p in first),
        last_shapes=tuple(tuple(p.shape) for p in last),
        vocabulary=settings.vocab_size,
        tied=bool(getattr(settings, "tie_word_embeddings", False)),
    )
