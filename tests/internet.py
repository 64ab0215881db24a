"""Peers of an internet run as real processes on loopback, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from patience import patience
from processes import HERE, free_port
from warm import Python

from farflung.networks.internet import Identity, Ticket


def new_ticket(folder: Path, port: int, **settings: Any) -> Path:
    """The ticket of a run whose first peer, with its key in first.key, listens at a port."""
    first = Identity(folder / "first.key")
    ticket = Ticket.new("test", settings).at((f"/ip4/127.0.0.1/tcp/{port}/p2p/{first.peer}",))
    path = folder / "run.ticket"
    ticket.write(path)
    return path


def run_peers(peers: int, case: str, argument: str, out: Path, script: str = "internet_peer.py") -> list[Any]:
    """Runs a script once a peer; what each observed, in order of their ranks."""
    port = free_port()
    new_ticket(out, port)
    processes = [Python(HERE / script, case, argument, out, number, peers, port) for number in range(peers)]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=patience(60))
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(path, weights_only=False) for path in sorted(out.glob("*.pt"), key=lambda path: int(path.stem))]
