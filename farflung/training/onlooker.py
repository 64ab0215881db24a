"""Who looks on at a run on the internet: it trains nothing, and sees what the peers say of themselves."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError
from farflung.networks.base import ALONE
from farflung.networks.listening import ListenAddress
from farflung.outer.elastic import WHY_ALONE
from farflung.training.terminal import say

if TYPE_CHECKING:
    from farflung.networks.internet import InternetNetwork, Peers, Ticket
    from farflung.networks.internet.contact.member import Member


@contextlib.contextmanager
def looking_on(
    ticket: Ticket, local: ListenAddress, key: Path | None = None, name: str = "", bootstrap: bool = False
) -> Iterator[InternetNetwork]:
    """A member that trains nothing, with a new key unless given one. Raises UserError.

    A `bootstrap` node starts the run and helps peers find each other; others are not listed.
    """
    parts = internet()
    info = parts.newcomer_info(ticket, name)
    with tempfile.TemporaryDirectory() as scratch:
        identity = parts.Identity(key or Path(scratch) / "onlooker.key")
        peers: Peers = parts.Peers(ticket, identity, local, info, say, first=bootstrap, listed=bootstrap)
        network: InternetNetwork = parts.InternetNetwork(peers, largest=1 << 20)
        try:
            yield network
        finally:
            network.close()


def seen(network: InternetNetwork) -> list[dict[str, Any]]:
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
        raise UserError(
            f"training on the internet needs {error.name or 'hivemind'}, which is not installed; "
            "install it with: pip install 'farflung[internet]'"
        ) from error
    return internet
