"""How long a simulated replica computes."""

from __future__ import annotations

import numpy as np

from farflung.networks.conditions import Conditions


class Computation:
    """One replica's inner steps: the same durations whether they are asked for one by one or many at a time."""

    def __init__(self, conditions: Conditions, rank: int) -> None:
        self._typical = conditions.step_seconds(rank)
        self._sigma = conditions.step_sigma
        self._slow_share, self._slow_factor = conditions.slow_share, conditions.slow_factor
        if self._sigma or self._slow_share:
            # Streams of their own: how many are taken of one does not change the other.
            self._spread, self._slow = (np.random.default_rng([conditions.seed, rank, n]) for n in range(2))

    def seconds(self, steps: int) -> float:
        """What the next so many steps take together."""
        factors = float(steps)
        if self._sigma or self._slow_share:
            each = np.exp(self._sigma * self._spread.standard_normal(steps))
            each[self._slow.random(steps) < self._slow_share] *= self._slow_factor
            factors = float(each.sum())
        return self._typical * factors
