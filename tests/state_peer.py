"""A peer that serves a state, or fetches one: `python state_peer.py serve|fetch FOLDER NUMBER PORT`.

What is done to it, it finds in the folder: `enough`, how many pieces it gives until that is gone; `killed`, when who
has asked before has died; `moved`, when the state is another; `NUMBER.forgets`, that it is to drop its snapshots.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import torch
from patience import patience, until

from farflung.networks import SharedState
from farflung.networks.internet import InternetNetwork
from farflung.testing.peers import join_network

CELLS, LENGTH, CHANGED = 40, 1 << 16, 5
"""Cells of one piece each, of so many values; so many have changed when the state has moved."""


def state(moved: bool) -> SharedState:
    tensors = {f"anchor of {n}": torch.full((LENGTH,), float(n - (moved and n < CHANGED) / 2)) for n in range(CELLS)}
    return SharedState(tensors, {"step": 20 if moved else 8, "until": 100 if moved else 15, "history": str(moved)})


def serve(network: InternetNetwork, folder: Path, number: int) -> None:
    """Gives its state until the test is over, and writes a byte for each piece that it has begun to give."""
    give, given = network.peers.handlers["piece"], folder / f"{number}.given"

    async def counting(stream: Any, frame: Any) -> None:
        enough, killed = folder / "enough", folder / "killed"
        early = not killed.exists()
        while enough.exists() and len(given.read_bytes()) >= int(enough.read_text()):
            await asyncio.sleep(0.02)
        if early and killed.exists():
            return  # who asked is no longer there
        with given.open("ab") as file:
            file.write(b".")
        await give(stream, frame)

    given.touch()
    network.peers.handlers["piece"] = counting
    network.serve(lambda: state((folder / "moved").exists()))
    while not (folder / "over").exists():
        if (forgets := folder / f"{number}.forgets").exists():
            network._snapshots._kept.clear()
            forgets.unlink()
        network.paced(20 if (folder / "moved").exists() else 8, 1000)
        time.sleep(0.02)


def fetch(network: InternetNetwork, folder: Path) -> None:
    """Fetches a state from all the others, and saves it."""
    donors = len(list(folder.glob("*.given")))
    until(lambda: len(network.peers.members.training()) == donors)
    found = network.fetch(identical=True).wait(patience(60))
    torch.save((found.tensors, found.facts["step"]), folder / "found.pt")
    network.accept()


if __name__ == "__main__":
    what, told, number, port = sys.argv[1:5]
    torch.set_num_threads(1)
    folder = Path(told)
    kept = folder / "fetched" if what == "fetch" else None
    network = join_network(folder, int(number), "127.0.0.1", int(port), patience(20), kept)
    serve(network, folder, int(number)) if what == "serve" else fetch(network, folder)
    network.close()
