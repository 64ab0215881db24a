"""Starting real processes in tests, each with a deadline; none is left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung import cli
from farflung.training import checkpoint

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_replicas(
    replicas: int,
    case: str,
    argument: str,
    out: Path,
    may_die: frozenset[int] = frozenset(),
    script: str = "torch_replica.py",
) -> list[Any]:
    """Runs a script once a replica; what each observed, by rank (None for those that may die)."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), case, argument, str(out)],
            env={**common, "RANK": str(rank), "WORLD_SIZE": str(replicas), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(replicas)
    ]
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=120)
            assert rank in may_die or process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    paths = [out / f"{rank}.pt" for rank in range(replicas)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def until(holds: Callable[[], Any], seconds: float = 90.0) -> None:
    """Waits for something to hold."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it never came to hold"
        time.sleep(0.05)


def farflung(*arguments: object, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "farflung", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The command in this process; its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["farflung", *arguments])
    try:
        cli.main()
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def saved(folder: Path, step: int, replica: int) -> dict[str, Any]:
    """A replica's checkpoint, of a run in which one process has all of it."""
    return checkpoint.read(checkpoint.path_of(folder, step, f"replica-{replica}"))
