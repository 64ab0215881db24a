"""Moves bytes between simulated replicas: over shared links, with latency and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement, permutations
from typing import NamedTuple

from farflung.networks.base import Group
from farflung.networks.peers.circles import IN_TURN
from farflung.networks.simulator.clock import Clock
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.flows import Flow, Links

UNLIMITED = 1e15
"""Bytes a second of what is not limited."""


class Demand(NamedTuple):
    """What the members of a group send each other at once.

    `sent` and `received` are the bytes out of and into each member, in the group's order; `largest` is the most that
    goes over any one connection between two of them; so many `readers` have the same packet, which a store takes once.
    """

    group: Group
    sent: Sequence[float]
    received: Sequence[float]
    largest: float
    readers: int = 1

    @classmethod
    def even(cls, group: Group, nbytes: float, readers: int = 1) -> Demand:
        """Each member sends each of the others so many bytes."""
        total = [(len(group) - 1) * nbytes] * len(group)
        return cls(group, total, total, nbytes, readers)

    def through_store(self) -> Iterator[Demand]:
        """The same where all goes up to a store first, and then down to its readers."""
        none = [0.0] * len(self.group)
        yield Demand(self.group, [sent / self.readers for sent in self.sent], none, self.largest)
        yield Demand(self.group, none, self.received, self.largest)


class Fabric:
    """The links of a world: two for each replica, to send and receive, and between sites those that all there share."""

    def __init__(self, clock: Clock, conditions: Conditions, replicas: int) -> None:
        self._clock = clock
        self.conditions = conditions
        self._site = [conditions.site_of(rank) for rank in range(replicas)]
        capacities = []
        for rank in range(replicas):
            capacities += [conditions.up_bytes(rank), conditions.down_bytes(rank)]
        self._trunks: dict[tuple[int, int], int] = {}
        for one, other in permutations(range(len(conditions.sites)), 2):
            link = conditions.link(one, other)
            if link.shared:
                self._trunks[one, other] = len(capacities)
                capacities.append(min(link.bandwidth_mbps * 125e3, UNLIMITED))
        self.links = Links(clock, capacities)

    def ways(self, demands: Iterator[Demand]) -> Iterator[Demand]:
        """What is sent at once, hop after hop: straight to each other, or through a store."""
        for demand in demands:
            yield from [demand] if self.conditions.store_ms is None else demand.through_store()

    def send(self, demand: Demand, key: str, arrived: Callable[[], None]) -> Flow:
        """Sends everything off now; `arrived` is called when all of it is there."""
        places = self._places(demand.group)
        loads, limit = self._loads(demand, places)

        def sent() -> None:
            self._clock.at(self._clock.now + self._latency(demand, places, key), arrived)

        return self.links.start(loads, limit, sent)

    def bytes_sent(self, rank: int) -> float:
        """What a replica's link has carried, headers and what was sent again included."""
        return self.links.carried[2 * rank]

    def _latency(self, demand: Demand, places: dict[int, int], key: str) -> float:
        if self.conditions.store_ms is not None:
            again = self.conditions.resendings(sum(demand.sent) + sum(demand.received), key)
            return (IN_TURN / 2 + again) * self.conditions.request_seconds(len(demand.group), key)
        latency = self.conditions.latency_seconds(places, key)
        if not self.conditions.loss:
            return latency
        return latency * (1 + 2 * self.conditions.resendings(sum(demand.sent), key))

    def _places(self, group: Group) -> dict[int, int]:
        """How many of a group's members are at each site."""
        places: dict[int, int] = {}
        for rank in group:
            site = self._site[rank]
            places[site] = places.get(site, 0) + 1
        return places

    def _loads(self, demand: Demand, places: dict[int, int]) -> tuple[dict[int, float], float]:
        """The bytes on each link, and the highest rate that single connections allow."""
        wire = (1 + self.conditions.headers) / (1 - self.conditions.loss)
        loads = {}
        for rank, sent, received in zip(demand.group, demand.sent, demand.received, strict=True):
            loads[2 * rank], loads[2 * rank + 1] = sent * wire, received * wire
        limit = math.inf
        if self.conditions.links and demand.largest:
            limit = self._slowest_connection(places) * max(loads.values()) / (demand.largest * wire)
            if self._trunks and len(places) > 1:
                self._load_trunks(demand, places, wire, loads)
        return loads, limit

    def _slowest_connection(self, places: dict[int, int]) -> float:
        pairs = (pair for pair in combinations_with_replacement(places, 2) if pair[0] != pair[1] or places[pair[0]] > 1)
        links = (self.conditions.link(one, other) for one, other in pairs)
        return min((link.bandwidth_mbps * 125e3 for link in links if not link.shared), default=math.inf)

    def _load_trunks(self, demand: Demand, places: dict[int, int], wire: float, loads: dict[int, float]) -> None:
        """Of what a site's members send, each other member gets an even part."""
        sent_by_site: dict[int, float] = dict.fromkeys(places, 0.0)
        for rank, sent in zip(demand.group, demand.sent, strict=True):
            sent_by_site[self._site[rank]] += sent
        for (one, other), trunk in self._trunks.items():
            if one in places and other in places:
                loads[trunk] = sent_by_site[one] * wire * places[other] / (len(demand.group) - 1)
