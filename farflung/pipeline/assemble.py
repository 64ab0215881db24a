"""Making one process's part of a replica."""

from __future__ import annotations

from typing import Any

import torch

from farflung.networks import Network, TorchNetwork
from farflung.pipeline.island import Island, WholeIsland
from farflung.pipeline.mesh import Mesh
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Workload


def assemble(
    settings: IslandSettings,
    workload: Workload,
    network: Network,
    mesh: Mesh,
    seed: int,
    deadline: float,
    device: torch.device,
) -> tuple[Island, Network]:
    """This process's part of its replica, and the network on which it holds rounds. Raises UserError.

    Args:
        settings: how the replica is divided, and how it computes.
        workload: what is trained.
        network: of all processes of the run.
        mesh: who is where.
        seed: of weights and batches.
        deadline: the longest wait for a round, in seconds.
        device: what is computed on.
    """
    if not network.processes or (mesh.island == 1 and not settings.offload):
        model = training(workload.build(seed), settings).to(device)
        return WholeIsland(settings, workload, model, mesh, network.rank, seed, device), network
    assert isinstance(network, TorchNetwork)  # what starts processes offers what it does
    from farflung.pipeline.build import part_of_island  # slow to import, and only islands need it

    island = part_of_island(settings, workload, network, mesh, seed, deadline, device)
    return island, network.among(mesh.data_parallel_group(island.coordinates))


def training(model: Any, settings: IslandSettings) -> Any:
    """The model as it is while it trains."""
    if settings.recompute:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()
