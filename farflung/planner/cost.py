"""What a method costs on given machines: memory, seconds, bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from farflung.codecs import ErrorFeedback
from farflung.outer import Method, parts_sent
from farflung.planner.architecture import Architecture
from farflung.planner.machines import Cluster
from farflung.planner.sizes import packet_bytes

TRAINED = 16
"""Bytes a parameter of float32 weights, gradients, and AdamW's two moments."""

COPY = 4
"""Bytes a parameter of one float32 copy."""

ACTIVATIONS = 34
"""Bytes that a layer keeps of each token and each of its hidden numbers, at 16 bits (arXiv 2205.05198, table 2)."""

LOGITS = 6
"""Bytes of a token's logit: at 16 bits, and at 32 for its loss."""

HALF = 2
"""Bytes of an activation between stages."""

RESERVED = 1e9
"""Bytes of each worker that its runtime takes."""

SAMPLES = 3
"""Rounds whose random pairs an exchange's time is the mean of."""


@dataclass(frozen=True)
class Layout:
    """How workers form replicas.

    Args:
        replicas: copies of the model, each on an island.
        stages: of the pipeline in each.
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


@dataclass(frozen=True)
class Batch:
    """What one inner step trains on.

    Args:
        tokens: of all replicas together.
        sequence_length: tokens in a sequence.
        micro_batch: sequences in a microbatch.
    """

    tokens: int
    sequence_length: int
    micro_batch: int = 1

    def microbatches(self, layout: Layout) -> int:
        """Of one worker's pipeline in a step; 0 when there are fewer sequences than workers that need one."""
        return self.tokens // (layout.replicas * layout.shards * self.sequence_length * self.micro_batch)


def memory_bytes(model: Architecture, method: Method, layout: Layout, batch: Batch) -> float:
    """The most that any worker needs."""
    needed = []
    stages = zip(model.stage_shapes(layout.stages), model.stage_layers(layout.stages), strict=True)
    for stage, (shapes, layers) in enumerate(stages):
        parameters = sum(map(math.prod, shapes)) / layout.shards
        # A stage holds the activations of the microbatches that have passed it and not yet come back.
        held = min(layout.stages - stage, max(batch.microbatches(layout), 1))
        tokens = batch.micro_batch * batch.sequence_length
        activations = tokens * model.hidden * layers * ACTIVATIONS * held
        logits = tokens * model.vocabulary * LOGITS if stage == layout.stages - 1 else 0
        needed.append(parameters * (TRAINED + outer_bytes(method)) + activations + logits + RESERVED)
    return max(needed)


def outer_bytes(method: Method) -> float:
    """What rounds keep for each parameter: anchor, outer momentum, messages in flight, and what encoding left out."""
    if method.schedule.every is None:
        return 0.0
    feedback = COPY if isinstance(method.codec, ErrorFeedback) else 0
    if method.outer is None:
        return COPY + feedback
    in_flight = COPY / method.schedule.fragments * (1 + bool(method.schedule.delay))
    return 2 * COPY + in_flight + feedback


def step_seconds(model: Architecture, cluster: Cluster, layout: Layout, batch: Batch) -> float:
    """One inner step of the slowest island: a filling pipeline, then one microbatch after the other."""
    microbatches = batch.microbatches(layout)
    tokens = batch.micro_batch * batch.sequence_length
    flops = model.flops_per_token(batch.sequence_length) * tokens / layout.stages
    slowest = 0.0
    for island in layout.islands:
        rates = [cluster.each[cluster.workers[worker]] for worker in island]
        compute = max(flops / (machine.tflops * 1e12 * machine.efficiency) for machine in rates)
        passing = [
            _passing_seconds(cluster, layout, island, stage, tokens * model.hidden * HALF)
            for stage in range(layout.stages - 1)
        ]
        filling = layout.stages * compute + sum(passing)
        steady = (microbatches - 1) * max([compute, *passing])
        slowest = max(slowest, filling + steady + _sharding_seconds(model, cluster, layout, island))
    return slowest


def _passing_seconds(cluster: Cluster, layout: Layout, island: Sequence[int], stage: int, nbytes: float) -> float:
    """Activations on to the next stage, and gradients back."""
    one, other = (cluster.workers[island[number * layout.shards]] for number in (stage, stage + 1))
    away = float(cluster.latency[one, other]) if one != other else 0.0
    bandwidth = float(cluster.bandwidth[one, other])
    return 2 * (away + nbytes / bandwidth)


def _sharding_seconds(model: Architecture, cluster: Cluster, layout: Layout, island: Sequence[int]) -> float:
    """FSDP: weights collected for both passes, gradients averaged, over the slowest link among a stage's workers."""
    if layout.shards == 1:
        return 0.0
    nbytes = 3 * COPY * (layout.shards - 1) / layout.shards * model.parameters / layout.stages
    seconds = []
    for stage in range(layout.stages):
        those = [cluster.workers[w] for w in island[stage * layout.shards : (stage + 1) * layout.shards]]
        seconds.append(nbytes / min(float(cluster.bandwidth[one, other]) for one in those for other in those))
    return max(seconds)


@dataclass(frozen=True)
class Exchange:
    """One round of all replicas: how long it takes by itself, and the bytes that all workers send."""

    seconds: float
    bytes_sent: float


def exchange(model: Architecture, method: Method, cluster: Cluster, layout: Layout) -> Exchange:
    """What a round costs, the same stage and shard of each replica with each other, all at the same time."""
    if method.schedule.every is None or layout.replicas == 1:
        return Exchange(0.0, 0.0)
    sizes = [packet_bytes(method.codec, shapes) / layout.shards for shapes in model.stage_shapes(layout.stages)]
    samples = []
    for number in range(SAMPLES if not method.topology.alike else 1):
        groups = method.topology.groups(tuple(range(layout.replicas)), f"plan {number}")
        samples.append(_exchange(method, cluster, layout, sizes, groups))
    return Exchange(mean(s.seconds for s in samples), mean(s.bytes_sent for s in samples))


def _exchange(
    method: Method, cluster: Cluster, layout: Layout, sizes: Sequence[float], groups: Sequence[tuple[int, ...]]
) -> Exchange:
    traffic = _Traffic(cluster)
    for group in groups:
        parts = parts_sent(method.codec, method.averaging, len(group))
        for place in range(layout.stages * layout.shards):
            workers = [layout.islands[replica][place] for replica in group]
            traffic.all_to_all(workers, sum(parts) * sizes[place // layout.shards], len(parts))
    return Exchange(traffic.seconds(), traffic.bytes_sent)


class _Traffic:
    """The bytes on each machine's network and between sites, all under way together."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loads: dict[tuple[str, int, int], float] = {}
        self._capacities: dict[tuple[str, int, int], float] = {}
        self._latency = 0.0
        self.bytes_sent = 0.0

    def all_to_all(self, workers: Sequence[int], nbytes: float, hops: int) -> None:
        """Each worker sends each of the others so many bytes, in as many hops."""
        cluster = self._cluster
        machines: dict[int, int] = {}
        for worker in workers:
            machines[cluster.workers[worker]] = machines.get(cluster.workers[worker], 0) + 1
        self.bytes_sent += len(workers) * (len(workers) - 1) * nbytes
        wire = nbytes * (1 + cluster.network.headers)
        for one, count in machines.items():
            card = cluster.each[one].network_gbps * 125e6
            away = count * (len(workers) - count) * wire
            self._load("up", one, 0, away, card)
            self._load("down", one, 0, away, card)
            for other, others in machines.items():
                if other != one:
                    self._between(one, other, count * others * wire, wire)
                    self._latency = max(self._latency, hops * float(cluster.latency[one, other]))

    def seconds(self) -> float:
        """Until the last link is done, and the last message has arrived."""
        return max((load / self._capacities[name] for name, load in self._loads.items()), default=0.0) + self._latency

    def _between(self, one: int, other: int, nbytes: float, single: float) -> None:
        link = self._cluster.link(one, other)
        if link.shared:
            here, there = (self._cluster.sites.index(self._cluster.each[m].site) for m in (one, other))
            self._load("sites", here, there, nbytes, link.bandwidth_mbps * 125e3)
        elif math.isfinite(link.bandwidth_mbps):
            # Each connection has that bandwidth to itself: the slowest one counts.
            name = ("connection", one, other)
            self._loads[name] = max(self._loads.get(name, 0.0), single)
            self._capacities[name] = link.bandwidth_mbps * 125e3

    def _load(self, kind: str, one: int, other: int, nbytes: float, capacity: float) -> None:
        name = (kind, one, other)
        self._loads[name] = self._loads.get(name, 0.0) + nbytes
        self._capacities[name] = capacity


def blocked_seconds(method: Method, exchange_seconds: float, step: float) -> float:
    """What a replica waits in each round: what its delay does not hide."""
    return max(0.0, exchange_seconds - method.schedule.delay * step)
