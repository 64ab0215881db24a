"""NoLoCo and DiLoCo in plain float64 numpy, from the papers' equations alone; shares no code with farflung."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def noloco_round(
    anchors: list[Vector],
    momenta: list[Vector],
    weights: list[Vector],
    groups: list[tuple[int, ...]],
    lr: float,
    momentum: float,
    gamma: float,
) -> tuple[list[Vector], list[Vector]]:
    """v_i ← α·v_i - β·mean(Δ) - γ·(φ_i - mean(φ)); φ_i ← φ_i + v_i, with the means over i's group.

    Who is in no group keeps all.
    """
    new_anchors, new_momenta = list(anchors), list(momenta)
    for group in groups:
        mean_delta = sum(anchors[i] - weights[i] for i in group) / len(group)
        mean_anchor = sum(anchors[i] for i in group) / len(group)
        for i in group:
            new_momenta[i] = momentum * momenta[i] - lr * mean_delta - gamma * (anchors[i] - mean_anchor)
            new_anchors[i] = anchors[i] + new_momenta[i]
    return new_anchors, new_momenta


def diloco_round(
    anchors: list[Vector], velocities: list[Vector], weights: list[Vector], lr: float, momentum: float
) -> tuple[list[Vector], list[Vector]]:
    """Δ = mean(φ - θ_i) over all; v ← μ·v + Δ; φ ← φ - η·(Δ + μ·v)."""
    delta = sum(anchor - weight for anchor, weight in zip(anchors, weights, strict=True)) / len(anchors)
    new_velocities = [momentum * velocity + delta for velocity in velocities]
    new_anchors = [a - lr * (delta + momentum * v) for a, v in zip(anchors, new_velocities, strict=True)]
    return new_anchors, new_velocities


def apply_delayed(weights_now: Vector, weights_at_start: Vector, new_anchor: Vector) -> Vector:
    """Applying a delayed round: the progress made since the round began comes on top of the new anchor."""
    return new_anchor + (weights_now - weights_at_start)
