"""The inner learning rate, step by step."""

from __future__ import annotations

import math

from farflung.settings import InnerSettings

STABLE_TAIL = 0.2
"""The part of a run in which a stable learning rate falls."""


def lr_scale(settings: InnerSettings, step: int, steps: int) -> float:
    """The share, 0 to 1, of the highest inner learning rate in a step (from 0) of so many: a rise, then a fall."""
    if step < settings.warmup:
        return (step + 1) / (settings.warmup + 1)
    progress = (step - settings.warmup) / max(steps - settings.warmup, 1)
    left = {
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
        "linear": 1 - progress,
        "stable": min(1.0, (1 - progress) / STABLE_TAIL),
    }
    return settings.lr_final + (1 - settings.lr_final) * left[settings.lr_schedule]
