"""How moments grow with the steps behind them, by which who has just come judges others'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BETAS = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}
"""Which of an optimizer's betas a moment forgets by."""

OWN_SETTING = {"momentum_buffer": "momentum", "slow_momentum": "slow_momentum"}
"""The setting by which another one does."""


def decay_of(kind: str, group: Mapping[str, Any]) -> float | None:
    """What a moment keeps of itself in a step, by what an optimizer's group of parameters says; None if unknown."""
    if kind in BETAS and "betas" in group:
        return float(group["betas"][BETAS[kind]])
    setting = OWN_SETTING.get(kind, "")
    return float(group[setting]) if setting in group else None


def growth_of(decay: float | None, own: float, run: float) -> float:
    """How many times as large a moment may be after all of a run's steps as after so many, or one where none are known.

    One that forgets is soon as large as it will be: however long a run is, nobody's are many times as large as that.
    """
    if decay is not None:
        return 1 / max(1e-6, 1 - math.pow(decay, max(1.0, own)))
    return max(1.0, run / own) if own else 1.0


@dataclass
class OwnPart:
    """What of a fragment's moments a replica has made by itself: others say what a mean is, and may lie."""

    averaged: set[str] = field(default_factory=set)
    """The kinds that are like others' by now."""
    lent: float = 0.0
    """How many of the steps that its optimizer counts are others'."""
    counted: float = 0.0
    """The steps that it counted after the last mean."""

    def steps(self, counted: float) -> float:
        """Its own steps, of all that its optimizer counts now; who was spoilt counts from none, and has none."""
        if counted < self.counted:
            self.averaged, self.lent, self.counted = set(), 0.0, 0.0
        return max(0.0, counted - self.lent)

    def takes(self, kinds: Iterable[str], counted: float, now: float) -> None:
        """Some kinds are a mean now, and with them the steps that were counted."""
        self.averaged.update(kinds)
        self.lent += now - counted
        self.counted = now
