"""N replicas in one process, under a virtual clock; and the clock, links and computation alone, to time runs with."""

from farflung.networks.simulator.cluster import SimulatedCluster, SimulatedCollective
from farflung.networks.simulator.conditions import (
    HEADERS,
    SMALLEST,
    Conditions,
    Cut,
    Death,
    Link,
    Site,
    check_number,
)
from farflung.networks.simulator.fabric import Demand
from farflung.networks.simulator.network import ReplicaDiedError, SimulatedNetwork, Simulation
from farflung.networks.simulator.presets import conditions_named
from farflung.networks.simulator.step_times import StepTimes

__all__ = [
    "HEADERS",
    "SMALLEST",
    "Conditions",
    "Cut",
    "Death",
    "Demand",
    "Link",
    "ReplicaDiedError",
    "SimulatedCluster",
    "SimulatedCollective",
    "SimulatedNetwork",
    "Simulation",
    "Site",
    "StepTimes",
    "check_number",
    "conditions_named",
]
