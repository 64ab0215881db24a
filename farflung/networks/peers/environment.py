"""What a script of a user's own tells its peer by environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from farflung.errors import UserError, disk_errors
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.identity import Identity
from farflung.networks.peers.ticket import Ticket, read_ticket

LAST_PORT = 65535


def ticket_from_env() -> Ticket:
    """The ticket that FARFLUNG_TICKET leads to. Raises UserError."""
    if path := os.environ.get("FARFLUNG_TICKET"):
        return read_ticket(Path(path))
    raise UserError("FARFLUNG_TICKET is not set; set it to the path of the run's ticket")


def identity_from_env() -> Identity:
    """The key in the file that FARFLUNG_KEY names, by default ./peer.key. Raises UserError."""
    path = Path(os.environ.get("FARFLUNG_KEY", "peer.key"))
    with disk_errors(f"read or write the key {path}", "name another file with FARFLUNG_KEY"):
        return Identity(path)


def listen_from_env() -> ListenAddress:
    """Where FARFLUNG_LISTEN and FARFLUNG_PORT say to listen. Raises UserError."""
    told = os.environ.get("FARFLUNG_PORT", "0")
    if not (told.isascii() and told.isdigit() and int(told) <= LAST_PORT):
        raise UserError(f"FARFLUNG_PORT is {told!r}; give a number from 1 to {LAST_PORT}, or 0 for a free port")
    return ListenAddress(os.environ.get("FARFLUNG_LISTEN", ListenAddress.listen), int(told))
