"""Joining from a user's own script, by environment variables."""

from __future__ import annotations

import os
from pathlib import Path

from farflung.networks.internet.admission import introduction
from farflung.networks.internet.host import Seat
from farflung.networks.internet.identity import Identity
from farflung.networks.internet.network import InternetNetwork
from farflung.networks.internet.ticket import read_ticket

LARGEST = 1 << 33
"""Bytes of the largest message of a model that is not known."""


def from_ticket(deadline: float) -> InternetNetwork:
    """The run that FARFLUNG_TICKET leads to; this peer's key is in FARFLUNG_KEY, by default ./peer.key.

    FARFLUNG_LISTEN and FARFLUNG_PORT say where it listens. Raises UserError.
    """
    ticket = read_ticket(Path(os.environ["FARFLUNG_TICKET"]))
    seat = Seat(os.environ.get("FARFLUNG_LISTEN", "0.0.0.0"), int(os.environ.get("FARFLUNG_PORT", "0")))
    identity = Identity(Path(os.environ.get("FARFLUNG_KEY", "peer.key")))
    return InternetNetwork(ticket, identity, seat, introduction(ticket), largest=LARGEST, deadline=deadline)
