"""Small facts told to all replicas, over the network that carries the rounds."""

from __future__ import annotations

import json
from typing import Any

from farflung.networks import Network, among_members
from farflung.networks.base import packet_of, words_of


def all_gather_facts(network: Network, value: Any, key: str, deadline_s: float) -> dict[int, Any]:
    """The value (anything that JSON holds) of every replica that can be reached, by rank. Raises PeerLostError."""
    packet = packet_of(json.dumps(value).encode())
    packets = among_members(
        network, lambda group: network.exchange(packet, group, f"{key} of {group}").wait(deadline_s)
    )
    return {rank: json.loads(words_of(packet)) for rank, packet in sorted(packets.items())}
