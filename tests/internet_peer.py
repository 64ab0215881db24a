"""One peer in a process of its own: `python internet_peer.py CASE ARGUMENT FOLDER NUMBER PEERS PORT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch_replica
from patience import patience, until

from farflung.testing.peers import take_seat

if __name__ == "__main__":
    case, argument, out, number, peers, port = sys.argv[1:7]
    torch.set_num_threads(1)
    folder = Path(out)
    network = take_seat(folder, int(number), "127.0.0.1", int(port), patience(20))
    until(lambda: len(network.members()) == int(peers))
    observed = getattr(torch_replica, case)(network, argument)
    torch.save(observed, folder / f"{network.rank}.pt")
    until(lambda: len(list(folder.glob("*.pt"))) == int(peers))  # others may still be reading
    network.close()
