"""How workers form replicas, and how long the bytes between them take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farflung.errors import counted
from farflung.pipeline.settings import IslandShape
from farflung.planner.machines import Cluster


@dataclass(frozen=True)
class Layout:
    """How workers form replicas.

    Args:
        replicas: copies of the model, each on an island.
        stages: of each replica's pipeline.
        shards: workers that share one stage (FSDP).
        islands: the workers of each replica, stage by stage, `shards` of each.
    """

    replicas: int
    stages: int
    shards: int
    islands: tuple[tuple[int, ...], ...]

    def machines(self, cluster: Cluster) -> set[int]:
        """The machines that it uses."""
        return {cluster.workers[worker] for island in self.islands for worker in island}

    def describe(self) -> str:
        """In words."""
        return f"{counted(self.replicas, 'island')} of {IslandShape(self.stages, self.shards)}"


Resource = tuple[str, int, int]
"""What carries bytes: a machine's network card, up or down; a shared link; a connection with a rate of its own."""


class UnderWay:
    """Bytes that are on their way at the same time, by what carries them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loads: dict[Resource, float] = {}
        self._capacities: dict[Resource, float] = {}

    def send(self, one: int, other: int, nbytes: float, connections: int = 1) -> None:
        """Sends so many bytes from one machine to another, on each of so many connections."""
        wire = nbytes * (1 + self._cluster.network.headers)
        for name, capacity in self._ways(one, other):
            # Each connection has a rate of its own, so the fullest counts; all else is shared.
            alone = name[0] == "connection"
            before = self._loads.get(name, 0.0)
            self._loads[name] = max(before, wire) if alone else before + connections * wire
            self._capacities[name] = capacity

    def all_to_all(self, machines: Sequence[int], nbytes: float) -> None:
        """Sends so many bytes from each worker on these machines to each other one."""
        counts = {machine: machines.count(machine) for machine in dict.fromkeys(machines)}
        for one, count in counts.items():
            for other, others in counts.items():
                if connections := count * (others - (one == other)):
                    self.send(one, other, nbytes, connections)

    def seconds(self) -> float:
        """Seconds until all bytes have left, without latency."""
        return max((load / self._capacities[name] for name, load in self._loads.items()), default=0.0)

    def seconds_between(self, one: int, other: int) -> float:
        """The same for the bytes from one machine to another."""
        return max(self._loads[name] / capacity for name, capacity in self._ways(one, other))

    def _ways(self, one: int, other: int) -> list[tuple[Resource, float]]:
        cluster = self._cluster
        if one == other:
            return [(("connection", one, one), float(cluster.bandwidth[one, one]))]
        ways = [(("up", one, 0), cluster.each[one].network_gbps * 125e6)]
        ways += [(("down", other, 0), cluster.each[other].network_gbps * 125e6)]
        link = cluster.link(one, other)
        if link.shared:
            here, there = (cluster.sites.index(cluster.each[m].site) for m in (one, other))
            ways.append((("sites", here, there), link.bandwidth_mbps * 125e3))
        elif math.isfinite(link.bandwidth_mbps):
            ways.append((("connection", one, other), link.bandwidth_mbps * 125e3))
        return ways


def latency(cluster: Cluster, one: int, other: int) -> float:
    """One way between two machines, seconds; none within one."""
    return float(cluster.latency[one, other]) if one != other else 0.0
