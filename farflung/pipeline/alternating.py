"""A replica whose steps are of a core and of all of the model in turn."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.joint.maps import core_alone, rest_of
from farflung.pipeline.island import WholeIsland
from farflung.workloads.base import Score


@dataclass
class AlternatingIsland(WholeIsland):
    """A replica that one process has all of, or the core of, as it is given the model.

    Steps with an even number, the first one among them, are the core's alone: the rest is left out of the forward pass
    and has no gradients, so that an optimizer leaves it and its state as they are.
    """

    def gradients(self, step: int) -> tuple[float, str]:
        """See Island."""
        if step % 2:
            return super().gradients(step)
        with core_alone(self.model):
            return super().gradients(step)

    def evaluate(self) -> Score:
        """See Island; where the model has a rest, the core's score is another figure."""
        score = super().evaluate()
        if not rest_of(self.model):
            return score
        with core_alone(self.model):
            core = super().evaluate()
        return score._replace(others={**score.others, "core": core.value})
