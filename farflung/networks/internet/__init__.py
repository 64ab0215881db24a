"""Peers on the open internet: what `farflung[internet]` adds. Nothing else imports hivemind."""

from farflung.networks.internet.contact.peers import Peers
from farflung.networks.internet.doors import DoorNetwork
from farflung.networks.internet.examination import examine
from farflung.networks.internet.fixed import FixedGroup
from farflung.networks.internet.network import InternetNetwork
from farflung.networks.listening import ListenAddress
from farflung.networks.peers.addresses import peers_at
from farflung.networks.peers.admission import newcomer_info
from farflung.networks.peers.identity import Identity
from farflung.networks.peers.ticket import Ticket, read_ticket
from farflung.renamed import renamed

__all__ = [
    "DoorNetwork",
    "FixedGroup",
    "Identity",
    "InternetNetwork",
    "ListenAddress",
    "Peers",
    "Ticket",
    "examine",
    "newcomer_info",
    "peers_at",
    "read_ticket",
]

__getattr__ = renamed(__name__, {"Seat": "farflung.networks.listening.ListenAddress", "introduction": "newcomer_info"})
