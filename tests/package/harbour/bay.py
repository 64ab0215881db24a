"""A network: replicas in one process, whose messages all take a second more than anywhere else."""

from __future__ import annotations

from dataclasses import replace

from farflung.networks import Conditions, NetworkKind, SimulatedNetwork, Simulation


def _simulated(replicas: int, conditions: Conditions) -> Simulation:
    return Simulation(replicas, replace(conditions, latency_ms=conditions.latency_ms + 1000))


BAY = NetworkKind(open=lambda starting, deadline: SimulatedNetwork.alone(), simulate=_simulated)
