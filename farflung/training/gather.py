"""Small facts told to all replicas, over the network that carries the rounds."""

from __future__ import annotations

import json
from typing import Any

import torch

from farflung.networks import Network


def gather(network: Network, value: Any, key: str, deadline: float) -> list[Any]:
    """Every replica's value (anything that JSON holds), by rank. Raises PeerLost."""
    packet = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    packets = network.exchange(packet, network.members(), key).wait(deadline)
    return [json.loads(packet.numpy().tobytes()) for _, packet in sorted(packets.items())]
