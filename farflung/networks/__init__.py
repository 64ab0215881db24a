"""Floor 2: who the other replicas are, and moving packets between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

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
from farflung.networks.membership import among_members, among_replicas_left, among_survivors
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.network import ReplicaDiedError, SimulatedNetwork, Simulation
from farflung.networks.simulator.presets import conditions_named
from farflung.registry import Registry
from farflung.renamed import renamed

__all__ = [
    "NETWORKS",
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
)


@dataclass(frozen=True)
class NetworkKind:
    """One kind of networks. Replicas are simulated where it says how; else each is a process, which opens its seat.

    Args:
        open: this process's seat, by its environment: waits for the others to start, and in rounds, at most so many
            seconds. Raises UserError. Where `farflung train` starts the processes, they offer what TorchNetwork does.
        simulate: makes so many replicas in this process, under some conditions.
        elastic: whether replicas come and go; those of `farflung join` do, and `farflung train` starts none.
    """

    open: Callable[[float, float], Network]
    simulate: Callable[[int, Conditions], Simulation] | None = None
    elastic: bool = False


def _peer(starting: float, deadline: float) -> Network:
    from farflung.networks.internet import InternetNetwork  # an extra

    return InternetNetwork.from_env(deadline)


def _check(kind: NetworkKind) -> None:
    if not isinstance(kind, NetworkKind):
        raise TypeError(f"it is {kind!r}, which is no farflung.networks.NetworkKind")


NETWORKS: Registry[NetworkKind] = Registry(
    "network",
    {
        "torch": NetworkKind(lambda starting, deadline: TorchNetwork.from_env(starting)),
        "simulated": NetworkKind(lambda starting, deadline: SimulatedNetwork.alone(), simulate=Simulation),
        "internet": NetworkKind(_peer, elastic=True),
    },
    _check,
)
"""All kinds by name. A package adds its own with an entry point in the group farflung.networks: a NetworkKind."""


def from_env(starting: float = 600.0, deadline: float = 120.0) -> Network:
    """The network this process was started for: torchrun's, a ticket's, or else one simulated replica alone.

    FARFLUNG_NETWORK names another.

    Args:
        starting: the longest that torchrun's other processes are waited for, in seconds.
        deadline: the longest that peers on the internet are waited for, in seconds.
    """
    name = "simulated"
    if "FARFLUNG_TICKET" in os.environ:
        name = "internet"
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        name = "torch"
    return NETWORKS[os.environ.get("FARFLUNG_NETWORK", name)].open(starting, deadline)
