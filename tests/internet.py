"""Peers of an internet run as real processes on loopback, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from patience import patience
from processes import HERE, free_port
from warm import Python

from farflung.testing.peers import write_ticket


def run_peers(peers: int, case: str, argument: str, out: Path, script: str = "internet_peer.py") -> list[Any]:
    """Runs a script once a peer; what each observed, in order of their ranks."""
    port = free_port()
    write_ticket(out / "run.ticket", out / "0.key", "127.0.0.1", port)
    processes = [Python(HERE / script, case, argument, out, number, peers, port) for number in range(peers)]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=patience(60))
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [torch.load(path, weights_only=False) for path in sorted(out.glob("*.pt"), key=lambda path: int(path.stem))]
