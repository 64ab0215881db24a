"""Small facts told to all replicas, over the network that carries the rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farflung.networks import Group, Network, PeerLost

T = TypeVar("T")


def among_the_living(network: Network, exchange: Callable[[Group], T]) -> T:
    """What an exchange among all members yields, which is tried again when some of them have died or come meanwhile.

    Raises PeerLost.
    """
    while True:
        group = network.members()
        try:
            return exchange(group)
        except PeerLost:
            if network.members() == group:
                raise


def gather(network: Network, value: Any, key: str, deadline: float) -> list[Any]:
    """Every replica's value (anything that JSON holds), by rank. Raises PeerLost."""
    packet = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    packets = among_the_living(
        network, lambda group: network.exchange(packet, group, f"{key} of {group}").wait(deadline)
    )
    return [json.loads(packet.numpy().tobytes()) for _, packet in sorted(packets.items())]
