"""Making a process's pieces of the model: sharded, if need be, and joined to those of the other processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from farflung.config import Config
from farflung.networks import TorchNetwork
from farflung.pipeline.assemble import training
from farflung.pipeline.balance import Span
from farflung.pipeline.division import Division, division_of
from farflung.pipeline.groups import Groups
from farflung.pipeline.layout import Layout
from farflung.pipeline.split import Piece, anatomy, keep
from farflung.pipeline.spread import Spread
from farflung.pipeline.subspace import confine
from farflung.workloads import models
from farflung.workloads.data import Data
from farflung.workloads.tokenizers import Tokenizer


def part_of_island(
    config: Config, tokenizer: Tokenizer, data: Data, network: TorchNetwork, device: torch.device
) -> Spread:
    """This process's part of its replica. Raises UserError."""
    layout = Layout.of(config)
    groups = Groups(network, layout, config.deadline, config.routes == "random", device)
    division = division_of(config, models.outline(models.model_config(config, tokenizer)))
    pieces = [piece.to(device) for piece in pieces_of(config, tokenizer, division, groups.place.stage)]
    for piece in pieces:
        training(piece.model, config)
    if layout.shards > 1 or config.offload:
        shard_pieces(pieces, groups.mesh(), config.offload)
    return Spread(config, groups, pieces, division, data, device)


def pieces_of(config: Config, tokenizer: Tokenizer, division: Division, stage: int) -> list[Piece]:
    """A stage's pieces, on the CPU; of the rest of the model nothing is ever made. Raises UserError."""
    return [
        Piece(_span_of(config, tokenizer, division, span), span, config.precision == "bfloat16")
        for span in division.spans[stage :: config.stages]
    ]


def _span_of(config: Config, tokenizer: Tokenizer, division: Division, span: Span) -> Any:
    def reshape(model: Any) -> None:
        if division.subspace:
            parts = anatomy(model)
            confine(model, parts[parts.layers], division.subspace, division.confined_layers)
        keep(model, span)

    return models.build(config, tokenizer, reshape)


def shard_pieces(pieces: list[Piece], mesh: DeviceMesh, offload: bool) -> None:
    """Divides each piece's parameters among the processes of a mesh, layer by layer (FSDP2)."""
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for piece in pieces:
        parts = anatomy(piece.model)
        for layer in parts[parts.layers][piece.span.begin : piece.span.end]:
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(piece, mesh=mesh, offload_policy=policy)
