"""Peers that meet in a folder: what `farflung[folder]` adds. It needs no hivemind."""

from farflung.networks.folder.examination import examine
from farflung.networks.folder.network import FolderNetwork
from farflung.networks.folder.presence import Presence
from farflung.networks.peers.admission import newcomer_info
from farflung.networks.peers.identity import Identity

__all__ = ["FolderNetwork", "Identity", "Presence", "examine", "newcomer_info"]
