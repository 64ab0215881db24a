"""Floor 2: who the other replicas are, and moving packets between them."""

from __future__ import annotations

import os

import torch.distributed as dist

from farflung.networks.base import (
    ElasticNetwork,
    Finished,
    Group,
    Network,
    Party,
    PeerLostError,
    Pending,
    SharedState,
    TimedNetwork,
    Traffic,
)
from farflung.networks.distributed import TorchNetwork
from farflung.networks.membership import among_members, among_survivors
from farflung.networks.simulator import Conditions, ReplicaDiedError, SimulatedNetwork, Simulation, conditions_named
from farflung.renamed import renamed

__all__ = [
    "Conditions",
    "ElasticNetwork",
    "Finished",
    "Group",
    "Network",
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
)


def from_env(starting: float = 600.0, deadline: float = 120.0) -> Network:
    """The network this process was started for: torchrun's, a ticket's, or else one simulated replica alone.

    Args:
        starting: the longest that torchrun's other processes are waited for, in seconds.
        deadline: the longest that peers on the internet are waited for, in seconds.
    """
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        return TorchNetwork.from_env(starting)
    if "FARFLUNG_TICKET" in os.environ:
        from farflung.networks.internet.environment import from_ticket  # an extra

        return from_ticket(deadline)
    return SimulatedNetwork.alone()
