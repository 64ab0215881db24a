"""Networks by name, as settings give them; a package adds one with an entry point of the group `farflung.networks`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.networks.peers.ticket import read_ticket
from farflung.registry import Registry

if TYPE_CHECKING:
    from farflung.networks.base import Network
    from farflung.networks.simulator.conditions import Conditions
    from farflung.networks.simulator.network import Simulation


@dataclass(frozen=True)
class NetworkKind:
    """One kind of networks. Replicas are simulated where it says how; else each is a process, which opens its seat.

    Args:
        open: this process's seat, by its environment: waits for the others to start, and in rounds, at most so many
            seconds. Raises UserError. Where `farflung train` starts the processes, they offer what TorchNetwork does.
        simulate: makes so many replicas in this process, under some conditions, and so many observers if any.
        elastic: whether replicas come and go; those of `farflung join` do, and `farflung train` starts none.
    """

    open: Callable[[float, float], Network]
    simulate: Callable[..., Simulation] | None = None
    elastic: bool = False


def _torch(starting: float, deadline: float) -> Network:
    from farflung.networks.distributed import TorchNetwork

    return TorchNetwork.from_env(starting)


def _alone(starting: float, deadline: float) -> Network:
    from farflung.networks.simulator.network import SimulatedNetwork

    return SimulatedNetwork.alone()


def _simulation(replicas: int, conditions: Conditions, observers: int = 0) -> Simulation:
    from farflung.networks.simulator.network import Simulation

    return Simulation(replicas, conditions, observers)


def _peer(starting: float, deadline: float) -> Network:
    from farflung.networks.internet import InternetNetwork  # an extra

    return InternetNetwork.from_env(deadline)


def _in_folder(starting: float, deadline: float) -> Network:
    from farflung.networks.folder import FolderNetwork  # an extra

    return FolderNetwork.from_env(deadline)


def _check(kind: NetworkKind) -> None:
    if not isinstance(kind, NetworkKind):
        raise TypeError(f"it is {kind!r}, which is no farflung.networks.NetworkKind")


NETWORKS: Registry[NetworkKind] = Registry(
    "network",
    {
        "torch": NetworkKind(_torch),
        "simulated": NetworkKind(_alone, simulate=_simulation),
        "internet": NetworkKind(_peer, elastic=True),
        "folder": NetworkKind(_in_folder, elastic=True),
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
        name = "folder" if read_ticket(Path(os.environ["FARFLUNG_TICKET"])).folder else "internet"
    if "WORLD_SIZE" in os.environ or _initialized():
        name = "torch"
    return NETWORKS[os.environ.get("FARFLUNG_NETWORK", name)].open(starting, deadline)


def _initialized() -> bool:
    """Whether this process is in a group of torch's already."""
    import torch.distributed as dist

    return dist.is_initialized()
