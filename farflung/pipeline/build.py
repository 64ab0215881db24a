"""Making a process's pieces of the model, and dividing them among shards."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from farflung.pipeline.division import Division
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Divisible


def pieces_of(settings: IslandSettings, workload: Divisible, division: Division, stage: int, seed: int) -> list[Any]:
    """A stage's pieces, on the CPU; the rest of the model is never made. Raises UserError."""
    pieces, constrained = [], division.spans[-1].begin
    for span in division.spans[stage :: settings.stages]:
        keep = partial(workload.keep, span=span, subspace=division.subspace, constrained=constrained)
        pieces.append(workload.piece(workload.build(seed, keep), span, settings.precision == "bfloat16"))
    return pieces


def shard_pieces(pieces: list[Any], workload: Divisible, mesh: DeviceMesh, offload: bool) -> None:
    """Divides each piece's parameters among the processes of a mesh, layer by layer (FSDP2)."""
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for piece in pieces:
        for layer in workload.layers(piece.model)[piece.span.begin : piece.span.end]:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(piece, mesh=mesh, offload_policy=policy)
