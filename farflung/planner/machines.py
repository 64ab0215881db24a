"""The machines that a run could use, and what joins them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from farflung.errors import UserError
from farflung.networks import Conditions, conditions_named
from farflung.networks.simulator.conditions import HEADERS, SMALLEST, Link, Site, check_number
from farflung.planner.folder import Folder
from farflung.planner.paths import Matrix
from farflung.tables import from_table, toml_table

MOST_MACHINES = 10_000
"""The most machines of one kind, and workers of one machine."""


@dataclass(frozen=True)
class Machines:
    """Machines that are alike, at one site.

    Args:
        count: how many.
        site: where; links are between sites.
        workers: GPUs (or other devices) in each.
        memory_gb: of each worker, gigabytes (10^9 bytes).
        tflops: of each worker, 10^12 operations a second at best, in the precision that is trained in.
        efficiency: the share of `tflops` that training reaches within a stage.
        device: what the workers are, gpu or cpu; a processor's memory is the machine's own.
        host_gbps: between each worker and its machine's memory, or its far folder, each way, gigabits a second.
        host_tflops: of each worker's part of its machine's processors, 10^12 operations a second that they reach.
        host_steps: parameters a second for which such a part makes a step of AdamW.
        inside_gbps: between the workers of one machine, gigabits a second.
        network_gbps: of each machine's network, each way, gigabits a second.
        price_per_hour: of one machine; needs a currency.
    """

    count: int
    memory_gb: float
    tflops: float
    site: str = "here"
    workers: int = 1
    efficiency: float = 0.4
    inside_gbps: float = 200.0
    device: Literal["gpu", "cpu"] = "gpu"
    host_gbps: float = 160.0
    host_tflops: float = 0.5
    host_steps: float = 400e6
    network_gbps: float = 10.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "workers"):
            check_number(name, getattr(self, name), 1, MOST_MACHINES)
        for name in ("memory_gb", "tflops", "host_gbps", "host_tflops", "host_steps", "inside_gbps", "network_gbps"):
            check_number(name, getattr(self, name), SMALLEST)
        check_number("efficiency", self.efficiency, SMALLEST, 1.0)
        if self.price_per_hour is not None:
            check_number("price_per_hour", self.price_per_hour)


@dataclass(frozen=True)
class Cluster:
    """All machines.

    Args:
        machines: of each kind and site.
        links: between sites, and within them.
        conditions: a preset or file whose links are taken for the sites that it names.
        currency: of prices.
        folder: its prices, where replicas meet in one.
        through_folder: whether they do.
    """

    machines: tuple[Machines, ...]
    links: tuple[Link, ...] = ()
    conditions: str = ""
    currency: str = ""
    folder: Folder = field(default_factory=Folder)
    through_folder: bool = False

    def __post_init__(self) -> None:
        """Refuses impossible values. Raises UserError."""
        if not self.machines:
            raise UserError("there are no machines; give some, each kind under [[machines]]")
        priced = [kind.price_per_hour is not None for kind in self.machines]
        if any(priced) and not self.currency:
            raise UserError('prices are given without a currency; add a line such as currency = "EUR"')
        if any(priced) and not all(priced):
            raise UserError("some machines have a price_per_hour and others have none; give all of them one")
        _ = self.network  # its own checks

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The names of all sites."""
        return tuple(dict.fromkeys(kind.site for kind in self.machines))

    @cached_property
    def each(self) -> tuple[Machines, ...]:
        """Every single machine, site by site."""
        kinds = sorted(self.machines, key=lambda kind: self.sites.index(kind.site))
        return tuple(kind for kind in kinds for _ in range(kind.count))

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The machine of every worker."""
        return tuple(number for number, machine in enumerate(self.each) for _ in range(machine.workers))

    def name(self, machine: int) -> str:
        """A machine's name: its site and its number."""
        return f"{self.each[machine].site} {machine}"

    def flops(self, worker: int) -> float:
        """A worker's operations a second."""
        machine = self.each[self.workers[worker]]
        return machine.tflops * 1e12 * machine.efficiency

    @cached_property
    def network(self) -> Conditions:
        """The links between the sites as conditions."""
        named = conditions_named(self.conditions) if self.conditions else Conditions()
        theirs = {frozenset(link.between): link for link in named.links if set(link.between) <= set(self.sites)}
        own = {frozenset(link.between): link for link in self.links}
        return Conditions(
            latency_ms=named.latency_ms if self.conditions else 0.1,
            headers=HEADERS,
            sites=tuple(Site(name) for name in self.sites),
            links=tuple({**theirs, **own}.values()),
        )

    def link(self, one: int, other: int) -> Link:
        """The link between two machines, by their numbers."""
        return self.network.link(*(self.sites.index(self.each[number].site) for number in (one, other)))

    @cached_property
    def latency(self) -> Matrix:
        """Between machines, seconds."""
        return self._matrix(lambda one, other: self.link(one, other).latency_ms / 1000)

    @cached_property
    def bandwidth(self) -> Matrix:
        """Of one connection between two machines, bytes a second; within a machine, between its workers."""
        return self._matrix(self._connection)

    def _connection(self, one: int, other: int) -> float:
        if one == other:
            return self.each[one].inside_gbps * 125e6
        cards = min(self.each[one].network_gbps, self.each[other].network_gbps) * 125e6
        return min(cards, self.link(one, other).bandwidth_mbps * 125e3)

    def _matrix(self, value: Callable[[int, int], float]) -> Matrix:
        count = len(self.each)
        return np.array([[value(one, other) for other in range(count)] for one in range(count)])

    def price(self, machines: set[int]) -> float | None:
        """What an hour of these machines costs; None without prices."""
        prices = [self.each[number].price_per_hour for number in machines]
        return None if None in prices else sum(price for price in prices if price is not None)


def read_cluster(path: Path) -> Cluster:
    """The machines of a TOML file. Raises UserError."""
    return from_table(Cluster, toml_table(path), str(path))
