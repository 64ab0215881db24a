"""The seconds of one inner step on given machines: computing, passing microbatches on, gathering shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from farflung.cells import Shape
from farflung.pipeline.boundaries import Boundary, boundary_named
from farflung.pipeline.settings import IslandSettings
from farflung.planner.architecture import Architecture
from farflung.planner.layout import Layout, UnderWay, latency
from farflung.planner.machines import Cluster
from farflung.planner.memory import COPY
from farflung.planner.sizes import shard_shapes
from farflung.workloads.base import Span
from farflung.workloads.subspace import Subspace


def step_seconds(
    model: Architecture,
    cluster: Cluster,
    layout: Layout,
    settings: IslandSettings,
    length: int,
    slower: Sequence[float] = (),
) -> float:
    """One inner step of the slowest island: its pipeline fills, then takes one microbatch after the other.

    `slower` is how many times as long each stage computes by a plan of its memory.
    """
    microbatches = settings.parts
    tokens = sequences_of(settings) * length
    spans = model.spans(layout.stages)
    factors = slower or [1.0] * len(spans)
    flops = [
        factor * tokens * model.flops_per_token(span, length, settings.recompute)
        for factor, span in zip(factors, spans, strict=True)
    ]
    passing = _passing_seconds(cluster, layout, boundary_bytes(model, settings, length))
    tied = _tied_seconds(model, cluster, layout)
    slowest = 0.0
    for island, between in zip(layout.islands, passing, strict=True):
        compute = [
            max(work / cluster.flops(worker) for worker in island[layout.shards * stage : layout.shards * (stage + 1)])
            for stage, work in enumerate(flops)
        ]
        filling = sum(compute) + sum(between)
        steady = (microbatches - 1) * max([*compute, *between])
        sharding = _sharding_seconds(model, cluster, layout, island, microbatches)
        slowest = max(slowest, filling + steady + sharding)
    return slowest + tied


def sequences_of(settings: IslandSettings) -> int:
    """Sequences in one microbatch of one worker."""
    return settings.batch_size // (settings.shard * settings.parts)


def boundary_bytes(model: Architecture, settings: IslandSettings, length: int) -> int:
    """Bytes that cross a boundary, one way, for one microbatch of one worker."""
    return _boundary_bytes(sequences_of(settings), length, model.hidden, settings.boundary)


@lru_cache
def _boundary_bytes(sequences: int, length: int, hidden: int, name: str) -> int:
    rank, codec = boundary_named(name)
    subspace = Subspace(hidden, rank, tokens=1, scale=1.0, seed=0) if rank else None
    return Boundary(torch.Size((sequences, length, hidden)), codec, subspace).nbytes


def _passing_seconds(cluster: Cluster, layout: Layout, nbytes: float) -> list[list[float]]:
    """Seconds for each island and boundary: a microbatch on to the next stage, and its gradient back.

    All pipelines pass theirs at the same time, and share links and network cards.
    """
    routes = [_routes(cluster, layout, island) for island in layout.islands]
    under_way = UnderWay(cluster)
    for one, other in (ends for island in routes for boundary in island for ends in boundary):
        under_way.send(one, other, nbytes)
        under_way.send(other, one, nbytes)

    def there_and_back(one: int, other: int) -> float:
        return sum(latency(cluster, *way) + under_way.seconds_between(*way) for way in ((one, other), (other, one)))

    return [[max(there_and_back(*ends) for ends in boundary) for boundary in island] for island in routes]


def _routes(cluster: Cluster, layout: Layout, island: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The machines on both sides of each boundary, shard by shard."""
    machines = [cluster.workers[worker] for worker in island]
    stages = [machines[layout.shards * stage : layout.shards * (stage + 1)] for stage in range(layout.stages)]
    return [list(zip(one, other, strict=True)) for one, other in pairwise(stages)]


def tied_bytes(model: Architecture, stages: int, shards: int) -> list[int]:
    """Bytes of the gradient that a tied head's copy sends in a step, shard by shard; as many come back."""
    if model.tied is None or stages == 1:
        return [0] * shards
    held = (shard_shapes([model.tied], shards, shard) for shard in range(shards))
    return [COPY * sum(map(math.prod, shapes)) for shapes in held]


def island_bytes(model: Architecture, settings: IslandSettings, length: int) -> int:
    """Bytes that the stages of one replica send each other in a step."""
    crossing = 2 * (settings.stages - 1) * settings.parts * settings.shard * boundary_bytes(model, settings, length)
    return crossing + 2 * sum(tied_bytes(model, settings.stages, settings.shard))


def _tied_seconds(model: Architecture, cluster: Cluster, layout: Layout) -> float:
    """Until every copy equals its embeddings again: first all gradients go, then all weights come back."""
    seconds, sizes = 0.0, tied_bytes(model, layout.stages, layout.shards)
    for way in (1, -1):
        under_way, away = UnderWay(cluster), 0.0
        for island in layout.islands:
            machines = [cluster.workers[worker] for worker in island]
            for last, first, nbytes in zip(machines[-layout.shards :], machines[: layout.shards], sizes, strict=True):
                if nbytes:
                    one, other = (last, first)[::way]
                    under_way.send(one, other, nbytes)
                    away = max(away, latency(cluster, one, other))
        seconds += under_way.seconds() + away
    return seconds


@dataclass(frozen=True)
class Gathered:
    """Bytes of padded shards that FSDP sends to each other shard in a step.

    Args:
        weights: each time that they are gathered.
        gradients: when they are averaged.
    """

    weights: int
    gradients: int

    @classmethod
    def of(cls, model: Architecture, span: Span, shards: int, microbatches: int) -> Gathered:
        """In a stage.

        torch's pipelines drop a layer's weights after each forward pass and keep them after each backward pass, so they
        are gathered once more than there are microbatches; what lies outside of layers, once.
        """
        layers = sum(_padded(part.shapes, shards) for part in model.layers[span.begin : span.end])
        outside = sum(_padded(part.shapes, shards) for part in model.parts(span)) - layers
        if model.tied and span.last and not span.first:
            outside += _padded([model.tied], shards)
        return cls((microbatches + 1) * layers + outside, layers + outside)


def _padded(shapes: Sequence[Shape], shards: int) -> int:
    """Bytes of one shard of these parameters, with rows dealt out evenly."""
    return COPY * sum(-(-rows // shards) * math.prod(rest) for rows, *rest in filter(None, shapes))


def _sharding_seconds(
    model: Architecture, cluster: Cluster, layout: Layout, island: Sequence[int], microbatches: int
) -> float:
    """FSDP: weights gathered, gradients averaged, over the slowest link among a stage's workers."""
    if layout.shards == 1:
        return 0.0
    seconds = []
    for stage, span in enumerate(model.spans(layout.stages)):
        gathered = Gathered.of(model, span, layout.shards, microbatches)
        nbytes = (layout.shards - 1) * (gathered.weights + gathered.gradients)
        those = [cluster.workers[w] for w in island[stage * layout.shards : (stage + 1) * layout.shards]]
        seconds.append(nbytes / min(float(cluster.bandwidth[one, other]) for one in those for other in those))
    return max(seconds)
