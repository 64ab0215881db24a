"""A run in which replicas train a core beside the whole model, and some of them that alone."""

from __future__ import annotations

from typing import Any

import torch

from farflung.errors import UserError
from farflung.joint.kinds import core_named
from farflung.joint.maps import reduce_to_core
from farflung.joint.settings import CoreSettings
from farflung.networks import Network
from farflung.outer.holders import Holders
from farflung.pipeline import Island, Mesh, MeshCoordinates
from farflung.pipeline.alternating import AlternatingIsland
from farflung.pipeline.assemble import training
from farflung.settings import Settings
from farflung.workloads import Workload


def holders_of(settings: Settings) -> Holders:
    """Which replicas hold what."""
    replicas, weak = settings.run.replicas, settings.core.core_only_replicas
    return Holders(tuple(range(replicas - weak, replicas)), settings.core.rest_every)


def alternating(
    settings: Settings, workload: Workload, network: Network, device: torch.device
) -> tuple[Island, Network]:
    """A replica that trains the core in turn with all of the model, or has that alone, and the network of its rounds.

    What it does not hold is never made.
    """
    core, island, seed = core_named(settings.core.core), settings.island, settings.run.seed
    alone = settings.core.core_only or network.rank in holders_of(settings).core_only

    def reshape(model: Any) -> None:
        core.divide(model)
        if alone:
            reduce_to_core(model)

    model = training(workload.build(seed, reshape), island).to(device)
    mesh = Mesh(settings.mesh().shapes, first=network.rank) if network.elastic else settings.mesh()
    place, ahead = MeshCoordinates(network.rank), not network.timed  # thousands may be simulated
    return AlternatingIsland(island, workload, model, mesh, place, seed, device, ahead), network


def outline(settings: Settings) -> Any:
    """The model that a run's strong replicas train, without memory for its weights. Raises UserError."""
    model = settings.made_workload().outline()
    if settings.core.core:
        core_named(settings.core.core).divide(model)
    return model


def check_core(settings: Settings) -> None:
    """Refuses a core that the model cannot have, or that a run cannot train. Raises UserError."""
    given, usual, island = settings.core, CoreSettings(), settings.island
    if not given.core:
        for name, value in vars(given).items():
            if value != getattr(usual, name):
                raise UserError(
                    f"{name} is {value}, but the model has no core; leave it out, or begin a run with --core lowrank16"
                )
        return
    method = settings.method()
    for what, why in {
        "stages and shards": island.divided or island.offload or island.gateway,
        "a swarm": island.swarm,
        "batched_replicas": island.batched_replicas,
        "independent replicas": settings.network.independent,
        "muon_align": settings.inner.muon_align,  # whose mean step is of steps of which the rest has only some
        "published weights (--pretrained)": getattr(settings.workload, "pretrained", False),
    }.items():
        if why:
            raise UserError(f"core is {given.core}, which does not go with {what}; leave one of them out")
    if method.outer is None or method.dealing:
        raise UserError(
            f"core is {given.core}, whose rest and core have rounds of their own, and method {settings.rounds.method} "
            "has none such; choose another, such as noloco or diloco"
        )
    _check_weak(settings)
    outline(settings)


def _check_weak(settings: Settings) -> None:
    """Refuses replicas that cannot have the core alone. Raises UserError."""
    weak, replicas = settings.core.core_only_replicas, settings.run.replicas
    if settings.network.kind.elastic:
        if weak:
            raise UserError(
                f"core_only_replicas is {weak}, but peers come and go; leave it out, and give --core-only to "
                "farflung join where a peer is to have the core only"
            )
    elif settings.core.core_only:
        raise UserError("core_only is for a peer that joins a run; here, give --core-only-replicas")
    elif weak > replicas:
        raise UserError(f"core_only_replicas is {weak}, but replicas is {replicas}; choose at most that")
