"""Exchanges among all members, whoever they are by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from farflung.networks.base import Group, Network, PeerLostError

T = TypeVar("T")


def among_the_living(network: Network, exchange: Callable[[Group], T]) -> T:
    """What an exchange among all members yields, which is tried again when some of them have died or come meanwhile.

    Raises PeerLostError.
    """
    while True:
        group = network.members()
        try:
            return exchange(group)
        except PeerLostError:
            if network.members() == group:
                raise
