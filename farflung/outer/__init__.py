"""Floor 3: the rounds between replicas. Read `loop.py` first."""

from farflung.outer.adaptation import Adapt
from farflung.outer.attached import Attached, Options
from farflung.outer.averaging import Way
from farflung.outer.counting import Shape, bytes_per_parameter, kept_bytes, message_bytes, parts_sent
from farflung.outer.faults import DivergedError
from farflung.outer.gradients import GradientLoop
from farflung.outer.inner import ADAMW, INNER, MUON, SIGN, Inner, MuonAdamW, SignSGD, names_of
from farflung.outer.loop import OuterLoop
from farflung.outer.merges import Drop, Eager, Keep, Merge, Mix, merge_named
from farflung.outer.method import Method
from farflung.outer.opened import Anchored
from farflung.outer.optimizers import (
    Average,
    GossipApart,
    GossipNesterov,
    OuterFactory,
    OuterOptimizer,
)
from farflung.outer.round import Round
from farflung.outer.schedules import Schedule
from farflung.outer.start import DisagreementError
from farflung.outer.topologies import Everyone, RandomGroups, Topology, group_of
from farflung.renamed import renamed

__all__ = [
    "ADAMW",
    "INNER",
    "MUON",
    "SIGN",
    "Adapt",
    "Anchored",
    "Attached",
    "Average",
    "DisagreementError",
    "DivergedError",
    "Drop",
    "Eager",
    "Everyone",
    "GossipApart",
    "GossipNesterov",
    "GradientLoop",
    "Inner",
    "Keep",
    "Merge",
    "Method",
    "Mix",
    "MuonAdamW",
    "Options",
    "OuterFactory",
    "OuterLoop",
    "OuterOptimizer",
    "RandomGroups",
    "Round",
    "Schedule",
    "Shape",
    "SignSGD",
    "Topology",
    "Way",
    "bytes_per_parameter",
    "group_of",
    "kept_bytes",
    "merge_named",
    "message_bytes",
    "names_of",
    "parts_sent",
]

__getattr__ = renamed(__name__, {"Disagreement": "DisagreementError", "Diverged": "DivergedError"})
