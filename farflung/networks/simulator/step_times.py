"""How long a simulated replica computes."""

from __future__ import annotations

import numpy as np

from farflung.networks.simulator.conditions import Conditions

BLOCK = 1024
"""Steps whose durations are drawn at a time."""


class StepTimes:
    """One replica's inner steps: the same durations whether they are asked for one by one or many at a time."""

    def __init__(self, conditions: Conditions, rank: int) -> None:
        self._conditions = conditions
        self._typical = conditions.step_seconds(rank)
        self._even = not conditions.step_sigma and not conditions.slow_share
        if not self._even:
            self._random = np.random.default_rng([conditions.seed, rank])
            self._ends = [0.0]  # of the steps drawn so far, in typical steps since the first of them began
            self._next = 0

    def seconds(self, steps: int) -> float:
        """The time of the next so many steps together."""
        if self._even:
            return self._typical * steps
        while self._next + steps >= len(self._ends):
            self._draw()
        begins, self._next = self._next, self._next + steps
        return self._typical * (self._ends[self._next] - self._ends[begins])

    def _draw(self) -> None:
        conditions = self._conditions
        factors = np.exp(conditions.step_sigma * self._random.standard_normal(BLOCK))
        factors[self._random.random(BLOCK) < conditions.slow_share] *= conditions.slow_factor
        left = [end - self._ends[self._next] for end in self._ends[self._next :]]
        drawn: list[float] = (left[-1] + np.cumsum(factors)).tolist()  # a list, since single numbers are taken of it
        self._ends, self._next = left + drawn, 0
