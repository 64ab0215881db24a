"""Addresses of libp2p's, which say where a peer on the internet is."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

LONGEST_ADDRESS, MOST_ADDRESSES, MOST_LETTERS = 512, 16, 2048
"""Letters of an address, addresses of a host, and letters of all that it tells: a relay cannot fill its record."""
KEPT = 512
"""Addresses that are read but once: each is heard of again and again."""
PLACES = "/ip4/", "/ip6/", "/dns/", "/dns4/", "/dns6/"


@functools.lru_cache(KEPT)
def leads_to(address: str, peer: str) -> bool:
    """Whether an address is one of libp2p's, that leads to a peer."""
    place, _, end = address.rpartition("/p2p/")
    if not place.startswith(PLACES) or end != peer or len(address) > LONGEST_ADDRESS or not address.isprintable():
        return False
    from hivemind.utils.multiaddr import Multiaddr  # an extra, which only runs with such addresses need

    try:
        return str(Multiaddr(place)) == place and str(readable(address)) == address
    except (ValueError, EOFError):
        return False


def peers_at(addresses: Iterable[str]) -> list[str]:
    """The ids of the peers that addresses lead to, each once."""
    return list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in addresses))


def is_global(address: str) -> bool:
    """Whether an address is one on the internet, and not one at a relay."""
    _, kind, place, *_ = [*address.split("/"), "", "", ""]
    known = kind.startswith("dns") or (kind in ("ip4", "ip6") and ipaddress.ip_address(place).is_global)
    return known and not at_relay(address)


def is_loopback(address: str) -> bool:
    """Whether an address leads to the machine itself."""
    _, kind, place, *_ = [*address.split("/"), "", "", ""]
    return kind in ("ip4", "ip6") and ipaddress.ip_address(place).is_loopback


def at_relay(address: str) -> bool:
    """Whether an address leads to a peer through another one, its relay."""
    return "/p2p-circuit" in address


@functools.lru_cache(KEPT)
def readable(address: str) -> Any:
    """An address for the daemon; hivemind writes the id of a relay in it as a CID, which the daemon cannot read."""
    from hivemind.p2p import PeerID
    from hivemind.utils.multiaddr import Multiaddr

    wire = Multiaddr(address).to_bytes()
    for kind, relay in pairwise(address.split("/")):
        if kind == "p2p":
            written = PeerID.from_base58(relay).to_bytes()
            wire = wire.replace(bytes([len(written) + 2, 1, 0x72]) + written, bytes([len(written)]) + written)
    return Multiaddr(wire)
