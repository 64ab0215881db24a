"""The inner learning rate, step by step."""

from __future__ import annotations

import math

from farflung.config import Config

STABLE_TAIL = 0.2
"""The part of a run in which a stable learning rate falls."""


def left_of_lr(config: Config, step: int) -> float:
    """The share, 0 to 1, of the highest inner learning rate in a step (from 0): a linear rise, then a fall."""
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    progress = (step - config.warmup) / max(config.steps - config.warmup, 1)
    left = {
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
        "linear": 1 - progress,
        "stable": min(1.0, (1 - progress) / STABLE_TAIL),
    }
    return config.lr_final + (1 - config.lr_final) * left[config.lr_schedule]
