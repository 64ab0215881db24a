"""Kinds of networks, described before one is made: the rows of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farflung.networks.base import Network
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.network import Simulation


@dataclass(frozen=True)
class NetworkKind:
    """One row. Replicas are simulated where it says how; else each is a process of its own, which opens its seat.

    Args:
        open: this process's seat, by its environment: waits for the others to start, and in rounds, at most so many
            seconds. Raises UserError. Where `farflung train` starts the processes, they offer what TorchNetwork does.
        simulate: makes so many replicas in this process, under some conditions.
        elastic: whether replicas come and go; those of `farflung join` do, and `farflung train` starts none.
    """

    open: Callable[[float, float], Network]
    simulate: Callable[[int, Conditions], Simulation] | None = None
    elastic: bool = False
