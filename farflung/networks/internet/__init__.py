"""Peers on the open internet: what `farflung[internet]` adds. Nothing else imports hivemind."""

from farflung.networks.internet.identity import Identity
from farflung.networks.internet.network import InternetNetwork
from farflung.networks.internet.swarm import Seat
from farflung.networks.internet.ticket import Ticket, read_ticket

__all__ = ["Identity", "InternetNetwork", "Seat", "Ticket", "read_ticket"]
