"""The process that hands a run on to trackers while it trains."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from farflung.report.trackers.follow import CATCH_UP_SECONDS, Replicas

UNTIL_CLOSED = "FARFLUNG_TRACKS_UNTIL_CLOSED"
"""Set in the environment of the process: the run has ended once its standard input is closed, by whatever death."""
GRACE_SECONDS = 15.0
"""What the process may take at its end beyond the trackers' own time."""
OF_A_REPLICA = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells a replica; accelerate would take the process for one."""


@contextlib.contextmanager
def tracked(folder: Path, names: str, replicas: Replicas, tell: Callable[[str], None]) -> Iterator[None]:
    """Hands a run on to trackers, if any are named, and tells at its end where the figures are or what failed."""
    if not names:
        yield
        return
    command = ["track", str(folder), "--to", names, "--replicas", replicas, "--follow"]
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_REPLICA}
    process = subprocess.Popen(
        [sys.executable, "-m", "farflung", *command],
        env={**environment, UNTIL_CLOSED: "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the run, whose last figures are still to come
    )
    try:
        yield
    finally:
        try:
            told, _ = process.communicate(timeout=CATCH_UP_SECONDS + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            told, _ = process.communicate()
        if process.returncode and not told:
            again = f"farflung track {shlex.quote(str(folder))} --to {names}"
            tell(f"tracking ended early; hand the rest on with: {again}")
        for line in told.splitlines():
            tell(line.removeprefix("farflung: "))
