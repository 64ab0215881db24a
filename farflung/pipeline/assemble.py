"""Making one process's part of a replica."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from farflung.errors import UserError
from farflung.hooks.trained import trainable
from farflung.networks import Network, SimulatedNetwork, TorchNetwork
from farflung.networks.settings import NetworkSettings
from farflung.pipeline.compiling import compile_layers
from farflung.pipeline.division import divisible, division_of
from farflung.pipeline.island import Island, WholeIsland
from farflung.pipeline.mesh import Mesh, MeshCoordinates
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Workload


def assemble(
    settings: IslandSettings,
    workload: Workload,
    network: Network,
    mesh: Mesh,
    seed: int,
    waits: NetworkSettings,
    device: torch.device,
) -> tuple[Island, Network]:
    """This process's part of its replica, and the network on which it holds rounds. Raises UserError and PeerLostError.

    `network` is that of all processes of the run, or an elastic one; `waits` are the longest for others.
    """
    processes, replicas = network.near or network, network
    if network.elastic or network.rank >= mesh.processes:  # which is its own, or an observer
        mesh = Mesh(mesh.shapes, first=network.rank)
    elif isinstance(network, TorchNetwork) and (settings.divided or settings.offload):
        replicas = network.of_islands(mesh.islands)
    settings = settings.of(mesh.shape(replicas.rank))
    if settings.processes == 1 and not settings.offload:
        model = training(workload.build(seed), settings).to(device)
        check_made(workload, model)
        place, ahead = MeshCoordinates(replicas.rank), not network.timed  # thousands may be simulated
        whole = (settings, workload, model, mesh, place, seed, device, ahead)
        if settings.batched_replicas and isinstance(network, SimulatedNetwork):
            from farflung.pipeline.batched import BatchedIsland  # slow to import

            return BatchedIsland(*whole, meet=network.meet), replicas
        return WholeIsland(*whole), replicas
    from farflung.pipeline.build import pieces_of, shard_pieces  # slow to import, and only islands need it
    from farflung.pipeline.divided import DividedIsland
    from farflung.pipeline.groups import ProcessGroups

    assert isinstance(processes, TorchNetwork)  # what starts processes offers what it does
    divided = divisible(workload)
    roaming, gateway = settings.routes == "random", settings.gateway
    coordinates = mesh.coordinates(processes.process)
    division = division_of(settings, divided, seed)
    pieces = [piece.to(device) for piece in pieces_of(settings, divided, division, coordinates.stage, seed)]
    for piece in pieces:
        training(piece.model, settings)
    groups = ProcessGroups(processes, mesh, waits, roaming, device, gateway)  # others may take longer to come so far
    if settings.shard > 1 or settings.offload:
        shard_pieces(pieces, divided, groups.shard_mesh(), settings.offload)
    island = DividedIsland(settings, groups, pieces, division, divided, seed, device)
    return island, replicas


def training(model: Any, settings: IslandSettings) -> Any:
    """The model as it is while it trains."""
    if settings.recompute:
        # transformers has called it by the second name before.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        recompute = next((found for name in names if (found := getattr(model, name, None))), None)
        if recompute is None:
            raise UserError(f"{type(model).__name__} cannot compute its layers twice; leave out --recompute")
        recompute({"use_reentrant": False})
    if settings.compile and not settings.memory:  # which has its own way to call compiled layers
        compile_layers(model)
    return model.train()


def check_made(workload: Workload, model: Any) -> None:
    """Refuses samples that no units are in, and a model of which nothing is trained. Raises UserError."""
    units = workload.units_per_sample
    if not (isinstance(units, Integral) and units >= 1):
        raise UserError(f"the workload's units_per_sample is {units!r}; let it be a whole number, of at least 1")
    if not trainable(model):
        found = len(list(model.parameters()))
        what = f"has {found} parameters, and none of them requires a gradient" if found else "has no parameters"
        raise UserError(f"the workload's model ({type(model).__name__}) {what}; let build give one to train")
