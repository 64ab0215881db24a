"""Peers on the open internet: what `farflung[internet]` adds. Nothing else imports hivemind."""

from farflung.networks.internet.admission import introduction
from farflung.networks.internet.examination import Finding, examine
from farflung.networks.internet.host import Seat
from farflung.networks.internet.identity import Identity
from farflung.networks.internet.network import InternetNetwork
from farflung.networks.internet.ticket import Ticket, read_ticket

__all__ = [
    "Finding",
    "Identity",
    "InternetNetwork",
    "Seat",
    "Ticket",
    "examine",
    "introduction",
    "read_ticket",
]
