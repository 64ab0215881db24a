"""Who looks on at a run of peers: it trains nothing, and sees what the peers say of themselves."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError
from farflung.networks.base import ALONE, Network
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.ticket import Ticket, read_ticket
from farflung.outer.elastic import WHY_ALONE
from farflung.training.terminal import say

LOOK_SECONDS = 30.0
"""How long a folder that does not answer is asked again, by those that wait for it."""

if TYPE_CHECKING:
    from farflung.networks.folder import FolderNetwork
    from farflung.networks.internet import InternetNetwork, Peers
    from farflung.networks.peers.member import Member

    OpenNetwork = InternetNetwork | FolderNetwork


@contextlib.contextmanager
def looking_on(
    ticket: Ticket, local: ListenAddress, key: Path | None = None, name: str = "", bootstrap: bool = False
) -> Iterator[OpenNetwork]:
    """A member that trains nothing, with a new key unless given one. Raises UserError.

    A `bootstrap` node starts the run and helps peers find each other; others are not listed, and in a folder only read.
    """
    if ticket.folder:
        with tempfile.TemporaryDirectory() as scratch:
            info = parts_for(ticket).newcomer_info(ticket, name)
            network = in_folder(ticket, Path(scratch) / "onlooker.key", LOOK_SECONDS, say, info, listed=False)
            try:
                yield network
            finally:
                network.close()
        return
    parts = internet()
    info = parts.newcomer_info(ticket, name)
    with tempfile.TemporaryDirectory() as scratch:
        identity = parts.Identity(key or Path(scratch) / "onlooker.key")
        peers: Peers = parts.Peers(ticket, identity, local, info, say, first=bootstrap, listed=bootstrap)
        meeting: InternetNetwork = parts.InternetNetwork(peers, largest=1 << 20)
        try:
            yield meeting
        finally:
            meeting.close()


def in_folder(
    ticket: Ticket,
    key: Path,
    deadline_s: float,
    tell: Callable[[str], None],
    info: dict[str, Any],
    near: Network | None = None,
    listed: bool = True,
) -> FolderNetwork:
    """A seat in a run whose peers meet in a folder, with the key in a file. Raises UserError.

    `info` is what the peer says of itself.
    """
    parts = parts_for(ticket)
    presence = parts.Presence(ticket, parts.Identity(key), info, tell, min(LOOK_SECONDS, deadline_s / 4), listed)
    network: FolderNetwork = parts.FolderNetwork(presence, deadline_s, near)
    return network


def seen(network: OpenNetwork) -> list[dict[str, Any]]:
    """The facts of each other peer, in order of rank."""
    members, shared = network.peers.members, network.peers.ticket.settings
    stages = shared.get("stages", 0) if shared.get("swarm") else 0
    median = members.median_step() or 0.0
    called = Counter(member.host for member in members.all())
    called[network.peers.info["host"]] += network.peers.info["trains"]
    return [
        {
            **member.facts,
            WHY_ALONE: dict(enumerate(ALONE.values(), 1)).get(int(member.facts.get(WHY_ALONE, 0)), ""),
            "name": member.host if called[member.host] == 1 else member.described,
            "state": _state(member),
            "step": member.step,
            "behind": max(0.0, median - member.step_now()),
            "heard": time.monotonic() - member.heard,
            **({"stage": member.stage, "stages": stages} if stages and member.shapes else {}),
        }
        for member in members.all()
    ]


def _state(member: Member) -> str:
    """What a peer does; one without a model only helps others find each other."""
    if not member.alive:
        return "gone"
    if member.facts.get("observes"):
        return "observes"
    return "trains" if member.trains else "begins" if member.shapes else "bootstrap"


def internet() -> Any:
    """The modules of the extra. Raises UserError where it is not installed."""
    try:
        from farflung.networks import internet
    except ImportError as error:
        raise missing(error, "internet") from error
    return internet


def parts_for(ticket: Ticket) -> Any:
    """The modules of the extra that a ticket's run needs. Raises UserError where it is not installed."""
    if not ticket.folder:
        return internet()
    try:
        from farflung.networks import folder
    except ImportError as error:
        raise missing(error, "folder") from error
    return folder


def ticket_in(path: Path) -> Ticket:
    """See `read_ticket`. Raises UserError, also where the extra is missing that the ticket's run needs."""
    try:
        return read_ticket(path)
    except ImportError as error:
        raise missing(error, "internet") from error


def missing(error: ImportError, extra: str) -> UserError:
    """What to say where an extra is not installed."""
    what = {"internet": "on the internet", "folder": "through a folder"}[extra]
    return UserError(
        f"training {what} needs {error.name}, which is not installed; install it with: pip install 'farflung[{extra}]'"
    )
