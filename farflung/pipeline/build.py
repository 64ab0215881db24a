"""Making a process's pieces of the model: sharded, if need be, and joined to those of the other processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from farflung.networks import TorchNetwork
from farflung.pipeline.assemble import training
from farflung.pipeline.divided import DividedIsland
from farflung.pipeline.division import Division, divisible, division_of
from farflung.pipeline.groups import ProcessGroups
from farflung.pipeline.mesh import Mesh
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Divisible, Workload


def part_of_island(
    settings: IslandSettings,
    workload: Workload,
    network: TorchNetwork,
    mesh: Mesh,
    seed: int,
    deadline: float,
    device: torch.device,
) -> DividedIsland:
    """This process's part of its replica; see assemble. Raises UserError."""
    whole = divisible(workload)
    groups = ProcessGroups(network, mesh, deadline, settings.routes == "random", device)
    division = division_of(settings, whole, seed)
    pieces = [piece.to(device) for piece in pieces_of(settings, whole, division, groups.coordinates.stage, seed)]
    for piece in pieces:
        training(piece.model, settings)
    if mesh.shards > 1 or settings.offload:
        shard_pieces(pieces, whole, groups.shard_mesh(), settings.offload)
    return DividedIsland(settings, groups, pieces, division, whole, seed, device)


def pieces_of(settings: IslandSettings, workload: Divisible, division: Division, stage: int, seed: int) -> list[Any]:
    """A stage's pieces, on the CPU; of the rest of the model nothing is ever made. Raises UserError."""
    pieces = []
    for span in division.spans[stage :: settings.stages]:
        keep = partial(workload.keep, span=span, subspace=division.subspace, constrained=division.constrained_layers)
        pieces.append(workload.piece(workload.build(seed, keep), span, settings.precision == "bfloat16"))
    return pieces


def shard_pieces(pieces: list[Any], workload: Divisible, mesh: DeviceMesh, offload: bool) -> None:
    """Divides each piece's parameters among the processes of a mesh, layer by layer (FSDP2)."""
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for piece in pieces:
        for layer in workload.layers(piece.model)[piece.span.begin : piece.span.end]:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(piece, mesh=mesh, offload_policy=policy)
