"""Which part of a replica this process has, and with whom it holds rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from farflung.errors import UserError
from farflung.files import write_text
from farflung.networks import Network
from farflung.pipeline.assemble import assemble
from farflung.pipeline.division import divisible
from farflung.pipeline.island import Island
from farflung.settings import Settings
from farflung.workloads import Workload

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork


def seated(settings: Settings, workload: Workload, network: Network, device: torch.device) -> tuple[Island, Network]:
    """This process's part, and the network of its rounds. Raises UserError and PeerLostError."""
    seed, waits = settings.run.seed, settings.network
    if not settings.island.swarm:
        return assemble(settings.island, workload, network, settings.mesh(), seed, waits, device)
    from farflung.swarm.island import SwarmIsland  # what it imports is an extra

    peers: InternetNetwork = network  # type: ignore[assignment]
    bounds = settings.run.steps, waits.deadline
    return SwarmIsland(settings.island, divisible(workload), peers, seed, device, bounds), network


def take_stage(network: InternetNetwork, stages: int, folder: Path) -> int:
    """The stage of a swarm that a peer serves: the one that it served before, or else that which needs it most."""
    from farflung.swarm.moves import Standing, stage_for_newcomer

    kept = folder / "stage"
    if kept.exists():
        stage = int(kept.read_text("utf-8"))
    else:
        known = {one.rank: Standing(one.stage) for one in network.peers.members.in_good_standing() if one.shapes}
        stage = stage_for_newcomer({rank: one for rank, one in known.items() if one.stage < stages}, stages)
        try:
            write_text(kept, f"{stage}\n")
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
    network.peers.info["stage"] = stage
    return stage
