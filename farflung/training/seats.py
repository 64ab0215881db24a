"""Which part of a replica this process has, and with whom it holds rounds."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from farflung.errors import UserError, disk_errors
from farflung.files import write_text
from farflung.networks import Network
from farflung.pipeline.assemble import assemble
from farflung.pipeline.division import divisible, division_of
from farflung.pipeline.island import Island
from farflung.settings import Settings
from farflung.swarm.moves import BYTES_A_PARAMETER, SETTLED, MoveError, stage_for_newcomer, standings
from farflung.training.core import alternating
from farflung.training.stopping import Stop
from farflung.training.terminal import say
from farflung.workloads import Workload

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork
    from farflung.networks.internet.contact.peers import Peers
    from farflung.networks.peers.member import Member


def seated(
    settings: Settings, workload: Workload, network: Network, folder: Path, device: torch.device, stop: Stop
) -> tuple[Island, Network]:
    """This process's part, and the network of its rounds. Raises UserError and PeerLostError."""
    seed, waits = settings.run.seed, settings.network
    if settings.core.core:
        return alternating(settings, workload, network, device)
    if not settings.island.swarm:
        return assemble(settings.island, workload, network, settings.mesh(), seed, waits, device)
    from farflung.swarm.island import End, SwarmIsland  # what these import is an extra
    from farflung.swarm.seat import Seat
    from farflung.swarm.stepping import STEPS

    peers: InternetNetwork = network  # type: ignore[assignment]
    room = _room(settings.run.device)  # before it has a model
    able = [stage for stage, size in enumerate(_stage_bytes(settings)) if size <= room]
    seat = Seat(settings.island, divisible(workload), peers, seed, device, waits.deadline)
    every = settings.run.checkpoint_every or settings.run.steps
    end = End(waits.deadline, lambda: stop.requested, folder / "copies", every, able)
    return SwarmIsland(seat, end, STEPS[settings.island.stepping](seat, settings.run.steps)), network


def _refuse_other_microbatches(settings: Settings, shared: Settings) -> None:
    """Refuses a peer of a swarm whose microbatches are not those of the run that it shares. Raises UserError."""
    for name, value in vars(shared.island).items():
        if vars(settings.island)[name] != value:
            raise UserError(
                f"{name} is {vars(settings.island)[name]!r}, and {value!r} in the run; all peers of a swarm have the "
                f"same, so leave it out"
            )


def stages_within_reach(settings: Settings, shared: Settings, folder: Path) -> list[int]:
    """The stages of a swarm that this peer can hold, or the one that it served before; none where there is no swarm.

    The `shared` settings are the ticket's. Raises UserError.
    """
    if not shared.island.swarm:
        return []
    _refuse_other_microbatches(settings, shared)
    kept, sizes, room = folder / "stage", _stage_bytes(settings), _room(settings.run.device)
    wanted = _served_before(kept, len(sizes)) if kept.exists() else list(range(len(sizes)))
    able = [stage for stage in wanted if sizes[stage] <= room]
    if not able:
        least = min(sizes[stage] for stage in wanted)
        remedy = "join anew with another --out" if kept.exists() else "have the run begun with more --stages"
        raise UserError(
            f"this peer has {room / 1e9:.3g} GB of memory free, and a stage needs about {least / 1e9:.3g} GB; free "
            f"some, or {remedy}"
        )
    return able


def _served_before(kept: Path, stages: int) -> list[int]:
    """The stage that a run folder is of. Raises UserError where there is no such stage."""
    with disk_errors(f"read {kept}", "choose another folder with --out"):
        told = kept.read_bytes().strip()
    found = [stage for stage in range(stages) if told == str(stage).encode()]
    if not found:
        raise UserError(f"{kept} names none of this run's {stages} stages; choose another folder with --out")
    return found


def furthest(network: InternetNetwork) -> int:
    """The step that the peers of all stages have reached."""
    return max((one.step for one in network.peers.members.in_good_standing() if "serves" in one.facts), default=0)


def keeping_on(train: Callable[[bool], None], first: bool, folder: Path) -> None:
    """Trains, perhaps as the `first` peer; one of a swarm that is to serve another stage joins again. Raises UserError.

    What it has of its stage is put aside in its folder then.
    """
    while True:
        try:
            return train(first)
        except MoveError as move:
            first = False
            _leave_stage(folder, move.stage)
            say(f"{move}; this peer goes there, and what it had is in {folder / 'earlier'}")


def _leave_stage(folder: Path, other: int) -> None:
    kept = folder / "stage"
    before = kept.read_text("utf-8").strip() if kept.exists() else "none"
    aside = folder / "earlier" / f"{len(list((folder / 'earlier').glob('*')))}-stage-{before}"
    with disk_errors(f"write to {folder}", "choose another folder with --out"):
        aside.mkdir(parents=True)
        for name in ("events", "checkpoints"):
            if (folder / name).exists():
                (folder / name).rename(aside / name)
        write_text(kept, f"{other}\n")


def take_stage(network: InternetNetwork, able: list[int], stages: int, folder: Path) -> None:
    """Chooses the stage of a swarm that a peer serves: of those that it can, that which needs it most.

    Raises UserError.
    """
    peers = network.peers
    stage = peers.background.run(_agreed(peers, able, stages), 60.0 * stages)
    peers.info["stage"] = stage
    with disk_errors(f"write to {folder}", "choose another folder with --out"):
        write_text(folder / "stage", f"{stage}\n")
    say(f"serves stage {stage} of {stages}, counted from 0")


async def _agreed(peers: Peers, able: list[int], stages: int) -> int:
    """The stage that needs one more most. Of newcomers who choose the same at once, all but one think again.

    That one is settled; where none is yet, it is the one with the lowest rank.
    """

    def there() -> list[Member]:
        return [one for one in peers.members.in_good_standing() if one.shapes and one.stage < stages]

    for _ in able:
        known = {one.rank: (one.stage, one.facts.get("capacity", 0.0)) for one in there()}
        chosen = stage_for_newcomer(standings((rank, *told) for rank, told in known.items()), stages, able)
        await peers.announce(stage=chosen)
        rivals = [one for one in there() if one.stage == chosen and known.get(one.rank, (None,))[0] != chosen]
        if not any(one.trains or SETTLED in one.facts or one.rank < peers.identity.rank for one in rivals):
            break
    # No await since the look around: whoever hears of the choice from here on hears that it is settled.
    peers.info["facts"] = {**peers.info["facts"], SETTLED: 1.0}
    return chosen


def _stage_bytes(settings: Settings) -> list[int]:
    """The memory that each stage takes, but for what is computed of microbatches under way."""
    workload = divisible(settings.made_workload())
    division = division_of(settings.island, workload, settings.run.seed)
    layers, before, after = workload.loads(workload.outline())
    return [
        BYTES_A_PARAMETER
        * int(
            sum(load.memory for load in layers[span.begin : span.end])
            + (before.memory if span.first else 0)
            + (after.memory if span.last else 0)
        )
        for span in division.spans
    ]


def _room(device: str) -> float:
    """Bytes of memory that this process can still take where it computes."""
    if device != "cpu" and torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return float(free if most == resource.RLIM_INFINITY else min(free, most))
