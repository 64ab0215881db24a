"""What a method's rounds cost on given machines: seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import mean

from farflung.cells import Cell
from farflung.codecs import Dense
from farflung.networks import Conditions
from farflung.networks.peers.circles import MEETING
from farflung.outer import Companion, Everyone, Method, message_bytes, traffic_per_hop
from farflung.planner.architecture import Architecture
from farflung.planner.folder import passage
from farflung.planner.layout import Layout, UnderWay, latency
from farflung.planner.machines import Cluster
from farflung.planner.timing import Timer

SAMPLES = 3
"""Rounds of random pairs over which an exchange's time is averaged."""

SETTLED, MEASURED = 8, 4
"""Rounds until fragments follow each other evenly, and the rounds after that whose mean is taken."""


@dataclass(frozen=True)
class Exchange:
    """One fragment's round of all replicas, by itself.

    Args:
        wire_seconds, latency_seconds: what its bytes take, and what latency adds.
        bytes_sent: by all workers.
        price: of a folder's requests and bytes, of all workers.
    """

    wire_seconds: float = 0.0
    latency_seconds: float = 0.0
    bytes_sent: float = 0.0
    price: float = 0.0

    @property
    def seconds(self) -> float:
        """From its start until all have the mean."""
        return self.wire_seconds + self.latency_seconds


def exchange(model: Architecture, method: Method, cluster: Cluster, layout: Layout) -> Exchange:
    """What a round costs. Each stage and shard exchanges with the same one of other replicas, all at the same time."""
    if method.schedule.every is None or layout.replicas == 1:
        return Exchange()
    places = model.kept_cells(layout.stages, layout.shards)
    sizes: dict[int, list[float]] = {}
    samples = []
    for number in range(SAMPLES if not method.topology.identical else 1):
        groups = method.topology.groups(tuple(range(layout.replicas)), f"plan {number}")
        for members in set(map(len, groups)) - set(sizes):
            whole = (message_bytes(method, cells, members) for cells in places)
            sizes[members] = [nbytes / method.schedule.fragments for nbytes in whole]
        samples.append(_through(method, cluster, layout, sizes, groups))
    besides = [one for one in (_beside(method, each, cluster, layout, places) for each in method.companions) if one]
    return Exchange(
        mean(sample.wire_seconds for sample in samples) + sum(one.wire_seconds for one in besides),
        mean(sample.latency_seconds for sample in samples) + sum(one.latency_seconds for one in besides),
        mean(sample.bytes_sent for sample in samples) + sum(one.bytes_sent for one in besides),
        mean(sample.price for sample in samples) + sum(one.price for one in besides),
    )


def _beside(
    method: Method, companion: Companion, cluster: Cluster, layout: Layout, places: Sequence[Sequence[Cell]]
) -> Exchange | None:
    """What a companion adds to a round; no seconds where replicas train meanwhile."""
    added = [one for cells in places if (one := companion.added(method, cells))]
    if not added:
        return None
    whole = [one.nbytes / method.schedule.fragments for one in added]
    groups = added[0].topology.groups(tuple(range(layout.replicas)), "plan")
    plain = replace(method, codec=Dense(), topology=added[0].topology, companions=())
    sizes = dict.fromkeys(set(map(len, groups)), whole)
    cost = _through(plain, cluster, layout, sizes, groups)
    return replace(cost, wire_seconds=0.0, latency_seconds=0.0) if added[0].hidden else cost


def _through(
    method: Method, cluster: Cluster, layout: Layout, sizes: dict[int, list[float]], groups: Sequence[tuple[int, ...]]
) -> Exchange:
    through = _through_folder if cluster.through_folder else _exchange
    return through(method, cluster, layout, sizes, groups)


def _through_folder(
    method: Method, cluster: Cluster, layout: Layout, sizes: dict[int, list[float]], groups: Sequence[tuple[int, ...]]
) -> Exchange:
    """Each worker's packet goes up to the store, and the others' come down."""
    folder, wire, away, sent, price = cluster.folder, 0.0, 0.0, 0.0, 0.0
    request = folder.latency_ms / 1000
    for group in groups:
        parts = traffic_per_hop(method.codec, method.averaging, len(group))
        each = [passage(len(group), parts, size) for size in sizes[len(group)] if len(group) > 1]
        sent += len(group) * sum(one.up for one in each)
        price += len(group) * sum(folder.price(one.writes, one.reads, one.down) for one in each)
        away = max([away, *(MEETING * request + one.seconds(math.inf, request) for one in each)])
        for replica in group:
            machines = [cluster.workers[worker] for worker in layout.islands[replica]]
            for machine in set(machines):
                here = sum(one.seconds(1.0, 0.0) for one, at in zip(each, machines, strict=False) if at == machine)
                wire = max(wire, here / (cluster.each[machine].network_gbps * 125e6))
    return Exchange(wire, away, sent, price)


def _exchange(
    method: Method, cluster: Cluster, layout: Layout, sizes: dict[int, list[float]], groups: Sequence[tuple[int, ...]]
) -> Exchange:
    under_way, away, sent = UnderWay(cluster), 0.0, 0.0
    for group in groups:
        parts = traffic_per_hop(method.codec, method.averaging, len(group))
        for place, size in enumerate(sizes[len(group)]):
            machines = [cluster.workers[layout.islands[replica][place]] for replica in group]
            under_way.all_to_all(machines, sum(parts) * size)
            sent += len(group) * (len(group) - 1) * sum(parts) * size
            ways = (latency(cluster, one, other) for one, other in permutations(set(machines), 2))
            away = max(away, len(parts) * max(ways, default=0.0))
    return Exchange(under_way.seconds(), away, sent)


def blocked_seconds(method: Method, exchanged: Exchange, step: float) -> float:
    """What a replica waits in each round, all fragments together: the part that its delay does not hide."""
    schedule = method.schedule
    if schedule.delay * schedule.fragments <= (schedule.every or 0):
        return schedule.fragments * max(0.0, exchanged.seconds - schedule.delay * step)
    return _crowded_seconds(method, exchanged, step)


def _crowded_seconds(method: Method, exchanged: Exchange, step: float) -> float:
    """The same where several fragments share the links at a time: measured in a simulation of two replicas."""
    pair = replace(method, topology=Everyone(), codec=Dense(), adapt=None)
    rate = Conditions(latency_ms=1000 * exchanged.latency_seconds / 2, step_ms=1000 * step)
    nbytes = method.schedule.fragments * exchanged.wire_seconds * rate.up_bytes(0)
    timing = Timer(pair, lambda members: nbytes, rate, 2, SETTLED + MEASURED, math.inf).run()
    landed = [times.landed for times in timing.rounds if times.fragment == 0]
    return max(0.0, (landed[-1] - landed[SETTLED - 1]) / MEASURED - (method.schedule.every or 0) * step)
