"""An island that is one peer on the internet: its processes, of which the first joins, and what they agree on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

from torch.distributed import HashStore

from farflung.errors import UserError, counted
from farflung.figure import Figure
from farflung.networks import Network, SimulatedNetwork, TorchNetwork
from farflung.networks.peers.addresses import peers_at
from farflung.networks.peers.ticket import Ticket, read_ticket
from farflung.pipeline import Mesh
from farflung.settings import Settings
from farflung.training import beginning, launch
from farflung.training.agreement import all_gather_facts, refuse_other_settings
from farflung.training.failures import RunFailedError
from farflung.training.kept import Coordination, Kept
from farflung.training.stopping import Stop
from farflung.training.terminal import say

T = TypeVar("T")


def launch_all(settings: Settings, folder: Path, arguments: list[str]) -> None:
    """Starts an island's processes on this machine, with these arguments of farflung; again when one dies.

    Raises StoppedError, UserError, and RunFailedError when they have died too often.
    """
    launch.check_settings(settings)
    restarts = settings.network.restarts
    for death in range(1, restarts + 2):
        try:
            launch.run_processes(settings, folder, arguments)
        except RunFailedError as error:
            if death > restarts:
                raise
            say(f"{error}; the island is started again ({death} of {restarts})")
            arguments = [word for word in arguments if word != "--first" or not knows_others(folder)]
        else:
            return


def knows_others(folder: Path) -> bool:
    """Whether the ticket that is kept there leads to more peers than this one."""
    path = folder / "run.ticket"
    if not path.exists():
        return False
    ticket = read_ticket(path)
    return bool(ticket.folder) or len(peers_at(ticket.addresses)) > 1


def opened(settings: Settings, ticket: Ticket) -> TorchNetwork:
    """The network of the island's processes, once all are there. Raises UserError where they mean unlike things."""
    near = TorchNetwork.from_env(settings.network.starting)
    shape, count = settings.island.shapes()[0], len(near.processes)
    if count != shape.processes:
        raise UserError(
            f"{shape} take {counted(shape.processes, 'process')}, and {count} came; start {shape.processes}"
        )
    secret = hashlib.sha256(json.dumps([ticket.name, str(ticket.secret)]).encode()).hexdigest()
    (_, (name, first)), *others = all_gather_facts(
        near, (ticket.name, secret), "tickets", settings.network.starting
    ).items()
    for process, (other, theirs) in others:
        if theirs != first:
            raise UserError(
                f"process {process} of the island has another ticket (of {other}) than process 0 (of {name}); "
                "give all of them the same ticket"
            )
    refuse_other_settings(near, settings)
    return near


def leads(near: TorchNetwork | None) -> bool:
    """Whether this process is the one that joins."""
    return near is None or near.process == 0


def led(near: TorchNetwork | None, settings: Settings, what: str, value: T) -> T:
    """What the process that joins says, which JSON must hold. Raises PeerLostError."""
    if near is None:
        return value
    found: T = all_gather_facts(near, value, what, settings.network.starting)[0]
    return found


def step_of(near: TorchNetwork | None, settings: Settings, folder: Path, rank: int) -> int:
    """The latest step at which all processes can go on from checkpoints; 0 where there is none."""
    mesh = Mesh(settings.mesh().shapes, first=rank)
    stem = mesh.file_stem(mesh.coordinates(near.process if near else 0))
    own = list(beginning.Standing.of(folder, rank, stem).steps)
    told = all_gather_facts(near, own, "checkpoints", settings.network.starting).values() if near else [own]
    return max(set.intersection(*map(set, told)), default=0)


def coordination(near: TorchNetwork | None, figure: Figure) -> Coordination:
    """What the peer's processes agree on."""
    processes, own = (range(len(near.processes)), near.process) if near else (range(1), 0)
    store = near.store if near else HashStore()
    return Coordination(Stop(store, processes, [own]), Kept(store, lambda: processes, figure))


def alone(near: TorchNetwork | None) -> Network:
    """The network of this peer alone."""
    return near.of_islands([tuple(near.processes)]) if near else SimulatedNetwork.alone()
