"""Floor 3: the rounds between replicas. Read `loop.py` first."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.hooks.start import DisagreementError
    from farflung.outer.adaptation import Adapt
    from farflung.outer.averaging import Way
    from farflung.outer.companions.alignment import AlignedSteps
    from farflung.outer.companions.base import Along, Companion
    from farflung.outer.companions.mixing import MixedAnchors
    from farflung.outer.companions.moments import AveragedMoments
    from farflung.outer.companions.primal import FastWeights
    from farflung.outer.counting import added_bytes, bytes_per_parameter, kept_bytes, message_bytes, traffic_per_hop
    from farflung.outer.elastic import ElasticLoop
    from farflung.outer.faults import DivergedError
    from farflung.outer.gasloc import GossipDrift
    from farflung.outer.gradients import GradientLoop
    from farflung.outer.holders import Holders
    from farflung.outer.loop import OuterLoop
    from farflung.outer.merges import Drop, Eager, Keep, KeepSent, KeepTurned, Merge, Mix, merge_named
    from farflung.outer.method import Method
    from farflung.outer.momentum import MomentumSchedule
    from farflung.outer.optimizers import (
        Average,
        GossipNesterov,
        OuterFactory,
        OuterOptimizer,
        ParameterAveraging,
        SplitGossip,
    )
    from farflung.outer.options import Options
    from farflung.outer.outcomes import Outcome, Round
    from farflung.outer.schedules import Schedule
    from farflung.outer.session import Session
    from farflung.outer.topologies import Everyone, RandomGroups, Topology, group_of

__all__ = [
    "Adapt",
    "AlignedSteps",
    "Along",
    "Average",
    "AveragedMoments",
    "Companion",
    "DisagreementError",
    "DivergedError",
    "Drop",
    "Eager",
    "ElasticLoop",
    "Everyone",
    "FastWeights",
    "GossipDrift",
    "GossipNesterov",
    "GradientLoop",
    "Holders",
    "Keep",
    "KeepSent",
    "KeepTurned",
    "Merge",
    "Method",
    "Mix",
    "MixedAnchors",
    "MomentumSchedule",
    "Options",
    "Outcome",
    "OuterFactory",
    "OuterLoop",
    "OuterOptimizer",
    "ParameterAveraging",
    "RandomGroups",
    "Round",
    "Schedule",
    "Session",
    "SplitGossip",
    "Topology",
    "Way",
    "added_bytes",
    "bytes_per_parameter",
    "group_of",
    "kept_bytes",
    "merge_named",
    "message_bytes",
    "traffic_per_hop",
]

_OF_INNER = ("ADAMW", "INNER", "MUON", "SIGN", "Inner", "MuonAdamW", "SignSGD")

__getattr__ = renamed(
    __name__,
    {
        "Anchored": "ParameterAveraging",
        "Attached": "Session",
        "Disagreement": "DisagreementError",
        "Diverged": "DivergedError",
        "GossipApart": "SplitGossip",
        "names_of": "farflung.inner.names_of",
        "parts_sent": "traffic_per_hop",
        **{name: f"farflung.inner.{name}" for name in _OF_INNER},
    },
    homes_of(__file__),
)
