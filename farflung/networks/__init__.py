"""Floor 2: who the other replicas are, and moving packets between them."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.networks.base import (
        ElasticNetwork,
        Finished,
        Group,
        IslandNetwork,
        Network,
        Party,
        PeerLostError,
        Pending,
        SharedState,
        TimedNetwork,
        Traffic,
    )
    from farflung.networks.distributed import TorchNetwork
    from farflung.networks.membership import Agree, among_members, among_replicas_left, among_survivors
    from farflung.networks.registry import NETWORKS, NetworkKind, from_env
    from farflung.networks.simulator.conditions import Conditions
    from farflung.networks.simulator.network import ReplicaDiedError, SimulatedNetwork, Simulation
    from farflung.networks.simulator.presets import conditions_named

__all__ = [
    "NETWORKS",
    "Agree",
    "Conditions",
    "ElasticNetwork",
    "Finished",
    "Group",
    "IslandNetwork",
    "Network",
    "NetworkKind",
    "Party",
    "PeerLostError",
    "Pending",
    "ReplicaDiedError",
    "SharedState",
    "SimulatedNetwork",
    "Simulation",
    "TimedNetwork",
    "TorchNetwork",
    "Traffic",
    "among_members",
    "among_replicas_left",
    "among_survivors",
    "conditions_named",
    "from_env",
]

__getattr__ = renamed(
    __name__,
    {
        "PeerLost": "PeerLostError",
        "Died": "ReplicaDiedError",
        "OpenNetwork": "ElasticNetwork",
        "State": "SharedState",
        "among_the_living": "among_members",
    },
    homes_of(__file__),
)
