"""One peer in a process of its own: `python internet_peer.py CASE ARGUMENT FOLDER NUMBER PEERS PORT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch_replica
from patience import patience, until

from farflung.networks.internet import Identity, InternetNetwork, ListenAddress, Peers, read_ticket


def join(folder: Path, number: int, port: int) -> InternetNetwork:
    """Joins when the first peer is there."""
    first, opened = number == 0, folder / "opened"
    until(lambda: first or opened.exists())
    peers = Peers(
        read_ticket(folder / "run.ticket"),
        Identity(folder / ("first.key" if first else f"{number}.key")),
        ListenAddress("127.0.0.1", port if first else 0),
        {"version": "1", "settings": "", "shapes": "", "host": f"host-{number}", "trains": True},
        first=first,
    )
    network = InternetNetwork(peers, largest=1 << 24, deadline=patience(20))
    opened.touch()
    return network


if __name__ == "__main__":
    case, argument, out, number, peers, port = sys.argv[1:7]
    torch.set_num_threads(1)
    folder = Path(out)
    network = join(folder, int(number), int(port))
    until(lambda: len(network.members()) == int(peers))
    observed = getattr(torch_replica, case)(network, argument)
    torch.save(observed, folder / f"{network.rank}.pt")
    until(lambda: len(list(folder.glob("*.pt"))) == int(peers))  # others may still be reading
    network.close()
