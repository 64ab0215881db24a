"""What a run needs of each worker's memory."""

from __future__ import annotations

import math

from farflung.config import Config
from farflung.methods import from_config
from farflung.outer import kept_bytes
from farflung.pipeline.balance import Span
from farflung.pipeline.division import microbatches_of
from farflung.planner.architecture import Architecture

COPY = 4
"""Bytes a parameter of one float32 copy."""

TRAINED = 4 * COPY
"""Bytes a parameter of weights, gradients, and AdamW's two moments."""

ACTIVATIONS = {"float32": 84, "bfloat16": 56}
"""Bytes that a layer of Llama keeps of each token and each of its hidden numbers, as measured."""

HALF = 2
"""Bytes a parameter of what autocast keeps of matrices in bfloat16, for each microbatch on its way."""

LOGITS = 12
"""Bytes of a token's logit: itself, its logarithm of a share, and its gradient."""

RESERVED = 1e9
"""Bytes of each worker that its runtime takes."""


def memory_bytes(model: Architecture, config: Config) -> float:
    """The most that any worker's device needs."""
    return max(_stage_bytes(model, config, stage, span) for stage, span in enumerate(model.spans(config.stages)))


def _stage_bytes(model: Architecture, config: Config, stage: int, span: Span) -> float:
    parameters = sum(part.parameters for part in model.parts(span))
    copied = math.prod(model.tied) if model.tied and span.last and not span.first else 0
    shapes = [shape for part in model.parts(span) for shape in part.shapes]
    kept = parameters * TRAINED + kept_bytes(from_config(config), shapes) + copied * 2 * COPY
    whole = 0.0
    if config.shard > 1 or config.offload:
        # FSDP gathers a stage's weights and adds up its gradients whole until the last microbatch is through.
        whole = 2.0 * COPY * (parameters + copied)
        kept = 0.0 if config.offload else kept / config.shard
    frozen = sum(buffer.numel() for buffer in model.outline.get_input_embeddings().buffers()) if span.first else 0
    return kept + whole + COPY * frozen + activation_bytes(model, config, stage, span) + RESERVED


def activation_bytes(model: Architecture, config: Config, stage: int, span: Span) -> float:
    """Of the microbatches that have passed a stage and not yet come back, and the largest tensors of one on its way."""
    parts = microbatches_of(config)
    held = min(config.stages - stage, parts)
    tokens = config.batch_size / config.shard / parts * config.sequence_length
    layers = model.layers[span.begin : span.end]
    half = HALF if config.precision == "bfloat16" else 0
    whole = tokens * model.hidden * ACTIVATIONS[config.precision] + half * max(layer.parameters for layer in layers)
    logits = tokens * model.vocabulary * LOGITS if span.last else 0.0
    if config.recompute:
        return held * tokens * model.hidden * COPY * len(layers) + whole + logits
    weights = half * sum(layer.parameters for layer in layers)
    return held * (tokens * model.hidden * ACTIVATIONS[config.precision] * len(layers) + weights) + logits
