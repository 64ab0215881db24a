"""How long does a round through a folder take, and how many requests does it make?
Peers in this process meet in a folder, in pairs and all together, and average a message; the store is a folder of this
machine unless `--at` names another. The time is the slowest peer's; requests are those of a peer and round, with beats
and removals. Takes two minutes.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch

from bench.lib.store import Store
from bench.lib.table import Part, Table
from farflung.networks import Group, Party, PeerLostError, Pending
from farflung.networks.folder import FolderNetwork, Identity, Presence, newcomer_info
from farflung.networks.peers.ticket import Ticket

DEADLINE = 120.0


@dataclass(frozen=True)
class Options:
    at: str = ""
    """The folder's URL, as `farflung invite --at` takes it; a folder of this machine unless given."""
    peers: tuple[int, ...] = (2, 8, 64)
    """Peers of a run."""
    values: int = 100_000
    """Values of a message, of 4 bytes."""
    rounds: int = 5
    """Rounds of each, after one to begin with; the median counts."""
    pause: float = 3.0
    """Seconds of training between two rounds."""


SMOKE = Options(peers=(2,), rounds=1, values=1000, pause=0.1)


def begun(url: str, keys: Path, count: int) -> list[FolderNetwork]:
    """So many peers of one run, who know each other."""
    ticket = Ticket.new("bench", {}).at((url,))
    networks = []
    for number in range(count):
        info = newcomer_info(ticket, f"peer-{number}") | {"trains": True}
        identity = Identity(keys / f"{count}-{number}.key")
        networks.append(FolderNetwork(Presence(ticket, identity, info, print, DEADLINE / 4), DEADLINE))
    for network in networks:
        network.peers.look(time.monotonic())
    return networks


def groups(networks: list[FolderNetwork], pairs: bool, number: int) -> dict[int, Group]:
    """Whom each wants to meet in a round."""
    ranks = [network.rank for network in networks]
    random.Random(number).shuffle(ranks)
    parts = [ranks[at : at + 2] for at in range(0, len(ranks), 2)] if pairs else [ranks]
    return {rank: tuple(sorted(part)) for part in parts for rank in part}


def round_of(networks: list[FolderNetwork], pairs: bool, number: int, values: int) -> tuple[float, float]:
    """The seconds that a round of all takes, and the share that met somebody."""
    wanted, key, began = groups(networks, pairs, number), f"{number} of {pairs}", time.monotonic()

    def meet(network: FolderNetwork) -> Pending[bool]:
        def averaged(party: Party) -> bool:
            if not party.group:
                return False
            try:
                network.all_reduce(torch.ones(values), party.group, f"{key}, mean").wait(DEADLINE)
            except PeerLostError:  # it left just when the other came
                return False
            return len(party.group) > 1

        return network.meet(wanted[network.rank], key, number, 1.0, "", averaged)

    pending = [meet(network) for network in networks]
    met = sum(one.wait(DEADLINE) for one in pending)
    return time.monotonic() - began, met / len(networks)


def run(options: Options, store: Store) -> Iterator[Part]:
    rows = []
    for count in options.peers:
        for pairs in (True, False)[: 1 if count == 2 else 2]:
            with tempfile.TemporaryDirectory() as scratch:
                networks = begun(options.at or (Path(scratch) / "store").as_uri(), Path(scratch), count)
                try:
                    told = [round_of(networks, pairs, 0, options.values)]
                    before = sum(network.traffic.requests for network in networks)
                    for number in range(1, options.rounds + 1):
                        time.sleep(options.pause)
                        told.append(round_of(networks, pairs, number, options.values))
                    requests = sum(network.traffic.requests for network in networks) - before
                finally:
                    for network in networks:
                        network.close()
                who = "pairs" if pairs else "all"
                seconds, met = zip(*told[1:], strict=True)
                rows.append((count, who, mean(met), median(seconds), requests / count / options.rounds))
    columns = {"peers": "d", "meet": "", "met": ".0%", "seconds": ".2f", "requests a peer and round": ".1f"}
    yield Table(columns, rows, f"{4e-6 * options.values:g} MB a message, median of {options.rounds} rounds")
