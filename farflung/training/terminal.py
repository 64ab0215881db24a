"""Urgent lines for the user, also from a process whose output goes to a file."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

STARTED_HERE = "FARFLUNG_STARTED_HERE"
"""Set in the environment of replicas that this machine's launcher watches itself."""

WATCHED_BY = "FARFLUNG_WATCHED_BY"
"""Set in the environment of independent replicas: the number of the process that watches over them."""

BEGIN_WITH = "FARFLUNG_BEGIN_WITH"
"""Set in the environment of independent replicas that begin a run: how many of them there are to be."""


def say(line: str, urgent: bool = False) -> None:
    """Writes a line to the user's terminal: the launcher's, where there is one and the system lets us.

    An independent replica has its own log, and only what is `urgent` goes to its launcher's terminal.
    """
    launcher = os.getppid() if STARTED_HERE in os.environ else os.environ.get(WATCHED_BY) if urgent else None
    if launcher:
        with contextlib.suppress(OSError), Path(f"/proc/{launcher}/fd/2").open("a") as terminal:
            terminal.write(f"farflung: {line}\n")
            return
    with contextlib.suppress(OSError):  # it may lie on the very disk that is full
        sys.stderr.write(f"farflung: {line}\n")
        sys.stderr.flush()
