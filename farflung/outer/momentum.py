"""An outer momentum that changes while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from farflung.errors import UserError
from farflung.outer.optimizers import ParameterAveraging


@dataclass(frozen=True)
class MomentumSchedule:
    """The outer momentum rises from 0 along a line, and then falls along another (Pier, arXiv 2511.17849).

    Rounds of the first steps would else carry on in directions that soon are none; those of the last ones overshoot.

    Args:
        highest: the momentum at the end of the rise.
        warmup: inner steps in which it rises.
        final: the momentum at the end of the run; None for the highest.
        steps: inner steps of the run.
    """

    highest: float
    warmup: int = 0
    final: float | None = None
    steps: int = 0

    def __post_init__(self) -> None:
        for name in ("highest", "final"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise UserError(f"MomentumSchedule has {name}={value}; choose at least 0 and less than 1")
        for name in ("warmup", "steps"):
            if getattr(self, name) < 0:
                raise UserError(f"MomentumSchedule has {name}={getattr(self, name)}; choose at least 0")

    def at(self, step: int) -> float:
        """The momentum of a round that is applied after so many inner steps."""
        if step < self.warmup:
            return self.highest * step / self.warmup
        fallen = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.highest if self.final is None else self.highest + (self.final - self.highest) * fallen

    def steer(self, outer: torch.optim.Optimizer, step: int) -> None:
        """Gives an outer optimizer the momentum of a step. Raises UserError where it has none."""
        for group in (outer.inner if isinstance(outer, ParameterAveraging) else outer).param_groups:
            if "momentum" not in group:
                raise UserError(f"outer momentum is to change, and {type(outer).__name__} has none; leave that out")
            group["momentum"] = self.at(step)
