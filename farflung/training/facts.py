"""Small facts told to all replicas, over the network that carries the rounds."""

from __future__ import annotations

import json
from typing import Any

import torch

from farflung.networks import Network, among_members


def all_gather_facts(network: Network, value: Any, key: str, deadline_s: float) -> dict[int, Any]:
    """The value (anything that JSON holds) of every replica that can be reached, by rank. Raises PeerLostError."""
    packet = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    packets = among_members(
        network, lambda group: network.exchange(packet, group, f"{key} of {group}").wait(deadline_s)
    )
    return {rank: json.loads(packet.numpy().tobytes()) for rank, packet in sorted(packets.items())}
