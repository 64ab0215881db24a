"""Floor 3: the rounds between replicas. Read `loop.py` first."""

from farflung.outer.attached import Attached, Disagreement, Diverged, Round
from farflung.outer.gradients import GradientLoop
from farflung.outer.loop import OuterLoop
from farflung.outer.optimizers import Average, GossipNesterov, OuterFactory, OuterOptimizer
from farflung.outer.schedules import Schedule
from farflung.outer.topologies import Everyone, RandomGroups, Topology

__all__ = [
    "Attached",
    "Average",
    "Disagreement",
    "Diverged",
    "Everyone",
    "GossipNesterov",
    "GradientLoop",
    "OuterFactory",
    "OuterLoop",
    "OuterOptimizer",
    "RandomGroups",
    "Round",
    "Schedule",
    "Topology",
]
