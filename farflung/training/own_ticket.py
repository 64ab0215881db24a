"""What a peer keeps in its run folder to come back with: its key, and a ticket to those who are there now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.errors import UserError
from farflung.networks.peers.ticket import Ticket
from farflung.training.events import join_command
from farflung.training.onlooker import parts_for, ticket_in

if TYPE_CHECKING:
    from farflung.networks.peers.identity import Identity
    from farflung.training.onlooker import OpenNetwork

TICKET_SECONDS = 10.0
"""How often a peer brings the ticket in its run folder up to date."""


def own_identity(ticket: Ticket, folder: Path, resumed: bool) -> Identity:
    """The key in a peer's run folder. Raises UserError where none can be, or another's run is."""
    key = folder / "peer.key"
    if not resumed or key.exists():
        try:
            identity: Identity = parts_for(ticket).Identity(key)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from error
        if not resumed or (folder / "events" / f"replica-{identity.rank}.jsonl").exists():
            return identity
    raise UserError(f"{folder} holds another peer's run; choose another folder with --out")


def with_newer_addresses(ticket: Ticket, kept: Path) -> Ticket:
    """The ticket, which also leads to those whom this peer knew last time."""
    if not kept.exists():
        return ticket
    known = ticket_in(kept)
    if known.secret != ticket.secret:
        raise UserError(
            f"{kept.parent} holds another run ({known.name}), which goes on with: {join_command(kept.parent)}; choose "
            "another folder with --out"
        )
    return ticket.at(tuple(dict.fromkeys((*ticket.addresses, *known.addresses))))


@contextlib.contextmanager
def ticket_kept(network: OpenNetwork, path: Path) -> Iterator[None]:
    """Keeps a ticket in the run folder that leads to the peers that are there now, for whoever is invited next."""
    over, written = threading.Event(), None

    def keep() -> None:
        nonlocal written
        if (ticket := network.invitation()) != written:
            with contextlib.suppress(OSError):  # a full disk spoils no training
                ticket.write(path)
                written = ticket

    def go_on() -> None:
        while not over.wait(TICKET_SECONDS):
            keep()

    keep()  # before the first step: whoever is killed in it comes back
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
