"""Floor 2: who the other replicas are, and moving packets between them."""

from __future__ import annotations

import os

import torch.distributed as dist

from farflung.networks.base import (
    Finished,
    Group,
    Network,
    OpenNetwork,
    Party,
    PeerLostError,
    Pending,
    State,
    TimedNetwork,
    Traffic,
)
from farflung.networks.distributed import TorchNetwork
from farflung.networks.living import among_the_living
from farflung.networks.simulator import Conditions, ReplicaDiedError, SimulatedNetwork, Simulation, conditions_named
from farflung.networks.survivors import among_survivors
from farflung.renamed import renamed

__all__ = [
    "Conditions",
    "Finished",
    "Group",
    "Network",
    "OpenNetwork",
    "Party",
    "PeerLostError",
    "Pending",
    "ReplicaDiedError",
    "SimulatedNetwork",
    "Simulation",
    "State",
    "TimedNetwork",
    "TorchNetwork",
    "Traffic",
    "among_survivors",
    "among_the_living",
    "conditions_named",
    "from_env",
]

__getattr__ = renamed(__name__, {"PeerLost": "PeerLostError", "Died": "ReplicaDiedError"})


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
