"""How much of each worker's memory a run needs."""

from __future__ import annotations

import math

from farflung.inner import Inner
from farflung.outer import Method, kept_bytes
from farflung.pipeline.settings import IslandSettings
from farflung.planner.architecture import Architecture
from farflung.planner.saved import counted
from farflung.planner.updates import updates_of
from farflung.workloads.base import Span

COPY = 4
"""Bytes a parameter of one float32 copy."""

LOGITS = 12
"""Bytes of a token's logit: itself, its log-probability, and its gradient."""

RESERVED = 1e9
"""Bytes that each worker's runtime takes."""


def memory_bytes(model: Architecture, island: IslandSettings, method: Method, length: int) -> float:
    """The most bytes that any worker's device needs, for sequences of a length."""
    spans = enumerate(model.spans(island.stages))
    return max(_stage_bytes(model, island, method, length, stage, span) for stage, span in spans)


def _stage_bytes(
    model: Architecture, island: IslandSettings, method: Method, length: int, stage: int, span: Span
) -> float:
    parameters = sum(part.parameters for part in model.parts(span))
    kept = 2.0 * COPY * parameters + moment_bytes(method.inner, model, span)
    kept += kept_bytes(method, model.stage_cells(span)) + copied_bytes(model, span)
    whole = 0.0
    if island.shard > 1 or island.offload:
        whole = 2.0 * COPY * _gathered(model, span, island.parts) + copied_bytes(model, span)
        kept = 0.0 if island.offload else kept / island.shard
    return kept + whole + frozen_bytes(model, span) + activation_bytes(model, island, length, stage, span) + RESERVED


def moment_bytes(inner: Inner, model: Architecture, span: Span) -> int:
    """Of what the inner optimizer keeps of a stage's parameters."""
    ends = [*([model.first] * span.first), *([model.last] * span.last)]
    layers = [updates_of(inner, layer.shapes, in_layers=True) for layer in model.layers[span.begin : span.end]]
    return sum(part.moment_bytes for part in [*layers, *(updates_of(inner, end.shapes, False) for end in ends)])


def _gathered(model: Architecture, span: Span, parts: int) -> int:
    """Parameters of a stage whose weights and gradients FSDP has whole at a time.

    Of several microbatches all, until the last one's backward pass; it shares gradients out layer by layer, through
    buffers as large again. What is in no layer is whole from pass to pass.
    """
    outside, layers = apart(model, span)
    return outside + (sum(layers) if parts > 1 else 2 * max(layers))


def apart(model: Architecture, span: Span) -> tuple[int, list[int]]:
    """Parameters of a stage that are in no layer, and those of each of its layers."""
    layers = [layer.parameters for layer in model.layers[span.begin : span.end]]
    return sum(part.parameters for part in model.parts(span)) - sum(layers), layers


def copied_bytes(model: Architecture, span: Span) -> int:
    """Of a last stage's copy of tied embeddings, and its gradient, which the first stage steps."""
    return 2 * COPY * math.prod(model.tied) if model.tied and span.last and not span.first else 0


def frozen_bytes(model: Architecture, span: Span) -> int:
    """Of what a first stage has of a subspace's embeddings besides what it trains."""
    numbers: int = sum(buffer.numel() for buffer in model.outline.get_input_embeddings().buffers())
    return COPY * numbers * span.first


def activation_bytes(model: Architecture, island: IslandSettings, length: int, stage: int, span: Span) -> float:
    """Bytes of the microbatches that have passed a stage and not yet come back, and of the largest tensors of one."""
    parts = island.parts
    held = island.in_flight(stage)
    sequences = max(1, island.batch_size // (island.shard * parts))
    saved = counted(model, sequences, length, island.precision)
    layers = saved.layers[span.begin : span.end]
    logits = sequences * length * model.vocabulary * LOGITS if span.last else 0.0
    if island.recompute:
        return held * saved.input * len(layers) + max(layers) + logits
    return held * sum(layers) + logits
