"""Joining from a user's own script, by environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from farflung.networks.internet.handshake import newcomer_info
from farflung.networks.internet.identity import Identity
from farflung.networks.internet.network import InternetNetwork
from farflung.networks.internet.peers import Peers
from farflung.networks.internet.ticket import read_ticket
from farflung.networks.listening import ListenAddress


def from_ticket(deadline: float) -> InternetNetwork:
    """The run that FARFLUNG_TICKET leads to; this peer's key is in FARFLUNG_KEY, by default ./peer.key.

    FARFLUNG_LISTEN and FARFLUNG_PORT say where it listens. Raises UserError.
    """
    ticket = read_ticket(Path(os.environ["FARFLUNG_TICKET"]))
    local = ListenAddress(os.environ.get("FARFLUNG_LISTEN", "0.0.0.0"), int(os.environ.get("FARFLUNG_PORT", "0")))
    identity = Identity(Path(os.environ.get("FARFLUNG_KEY", "peer.key")))
    return InternetNetwork(Peers(ticket, identity, local, newcomer_info(ticket)), deadline=deadline)
