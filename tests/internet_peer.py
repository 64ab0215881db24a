"""One peer in a process of its own: `python internet_peer.py CASE ARGUMENT FOLDER NUMBER PEERS PORT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch_replica

from farflung.networks.internet import Identity, InternetNetwork, Seat, read_ticket


def join(folder: Path, number: int, port: int, deadline: float = 20.0) -> InternetNetwork:
    first = number == 0
    return InternetNetwork(
        read_ticket(folder / "run.ticket"),
        Identity(folder / ("first.key" if first else f"{number}.key")),
        Seat("127.0.0.1", port if first else 0, first=first),
        {"version": "1", "settings": "", "shapes": "", "host": f"host-{number}", "trains": True},
        largest=1 << 24,
        deadline=deadline,
    )


def join_when_open(folder: Path, number: int, port: int) -> InternetNetwork:
    """Joins as soon as the first peer is there."""
    for _ in range(60):
        try:
            return join(folder, number, port)
        except ValueError:
            time.sleep(0.5)
    raise TimeoutError("the first peer never came")


def wait_for(network: InternetNetwork, peers: int) -> None:
    ends = time.monotonic() + 30
    while len(network.members()) < peers:
        assert time.monotonic() < ends, network.members()
        time.sleep(0.05)


if __name__ == "__main__":
    case, argument, out, number, peers, port = sys.argv[1:7]
    torch.set_num_threads(1)
    network = join_when_open(Path(out), int(number), int(port))
    wait_for(network, int(peers))
    observed = getattr(torch_replica, case)(network, argument)
    torch.save(observed, Path(out) / f"{network.rank}.pt")
    time.sleep(2)  # others may still be reading
    network.close()
