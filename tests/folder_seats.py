"""Peers of a run in a folder, in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from patience import patience

from farflung.networks import Party
from farflung.networks.folder import FolderNetwork, Identity, Presence, newcomer_info
from farflung.networks.peers.ticket import Ticket


class Seats:
    """Members of one run, whose folder has a URL; their keys lie in a folder of this machine."""

    def __init__(self, url: str, keys: Path) -> None:
        self.ticket = Ticket.new("test", {}).at((url,))
        self._keys = keys
        self.told: list[str] = []
        self.open: list[FolderNetwork] = []

    def sit(self, name: str, patience_s: float = 5.0, **info: Any) -> FolderNetwork:
        """One more member, which trains."""
        info = newcomer_info(self.ticket, name) | {"trains": True} | info
        presence = Presence(self.ticket, Identity(self._keys / f"{name}.key"), info, self.told.append, patience_s)
        self.open.append(FolderNetwork(presence, patience(10)))
        return self.open[-1]

    def by_rank(self, *names: str) -> list[str]:
        """Names in the order of the ranks that members of them have."""
        return sorted(names, key=lambda name: Identity(self._keys / f"{name}.key").rank)

    def look(self) -> None:
        """All hear of all."""
        for network in self.open:
            network.peers.look(time.monotonic())

    def leave(self, network: FolderNetwork) -> None:
        """One closes."""
        self.open.remove(network)
        network.close()


@contextlib.contextmanager
def seats(url: str, keys: Path, count: int) -> Iterator[Seats]:
    """So many members who have heard of each other; those that are left close in the end."""
    made = Seats(url, keys)
    try:
        for number in range(count):
            made.sit(f"peer-{number}")
        made.look()
        yield made
    finally:
        for network in made.open:
            network.close()


def met(networks: list[FolderNetwork], key: str, then: Callable[[FolderNetwork, Party], Any], **own: Any) -> list[Any]:
    """What all have of a round to which all come, each wanting all; `own` is what each says instead of the usual."""
    ranks = tuple(sorted(network.rank for network in networks))
    said = {"wanted": ranks, "step": 1, "weight": 1.0, "lineage": "same"} | own
    pending = [
        network.meet(key=key, then=lambda party, network=network: then(network, party), **said)  # type: ignore[misc]
        for network in networks
    ]
    return [one.wait(patience(20)) for one in pending]


def mean_of(networks: list[FolderNetwork], key: str, size: int = 40) -> list[Any]:
    """The means that all have of a round in which each brings its place in the list."""

    def then(network: FolderNetwork, party: Party) -> Any:
        own = torch.full((size,), float(networks.index(network)))
        return network.all_reduce(own, party.group, f"{key}, mean").wait(patience(10))

    return met(networks, key, then)
