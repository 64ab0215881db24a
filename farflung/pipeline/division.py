"""How the settings divide a model."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.codecs import Codec
from farflung.errors import UserError
from farflung.pipeline.balance import spans
from farflung.pipeline.boundaries import boundary_named
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Coordinates, Divisible, Span, Workload


@dataclass(frozen=True)
class Division:
    """How the settings divide a model. `tied` says whether the head is the embeddings again.

    The layers before the last boundary lie in the subspace, if there is one; those after it stay free.
    """

    spans: list[Span]
    codec: Codec
    subspace: Coordinates | None
    tied: bool


def divisible(workload: Workload) -> Divisible:
    """The workload, as one that can be divided. Raises UserError where it cannot be."""
    if workload.divisible is None:
        raise UserError(f"{type(workload).__name__} cannot be divided; leave out --stages, --shard and --offload")
    return workload.divisible


def division_of(settings: IslandSettings, workload: Divisible, seed: int) -> Division:
    """How the settings divide a workload's model. Raises UserError."""
    rank, codec = boundary_named(settings.boundary)
    model = workload.outline()
    cut = spans(*workload.loads(model), settings.pieces)
    subspace = workload.subspace(rank, seed) if rank else None
    return Division(cut, codec, subspace, workload.tied_weight(model) is not None)
