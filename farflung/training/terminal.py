"""Urgent lines for the user, also from a process whose output goes to a file."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import sys
import threading
from pathlib import Path

from farflung.signals import leave

STARTED_HERE = "FARFLUNG_STARTED_HERE"
"""Set in the environment of replicas that this machine's launcher watches itself: the number of its process."""

WATCHED_BY = "FARFLUNG_WATCHED_BY"
"""Set in the environment of independent replicas: the number of the process that watches over them."""

BEGIN_WITH = "FARFLUNG_BEGIN_WITH"
"""Set in the environment of independent replicas that begin a run: how many of them there are to be."""


def watcher() -> int | None:
    """The farflung process that has started this one to watch over it; None where a user's shell has, which may end."""
    return int(os.environ.get(STARTED_HERE) or os.environ.get(WATCHED_BY) or 0) or None


def abandoned() -> bool:
    """Whether the farflung process that watches over this one is gone."""
    launcher = multiprocessing.parent_process()
    return bool(watcher()) and launcher is not None and not launcher.is_alive()


_trains = threading.Event()

LOOK_SECONDS = 1.0
"""How often a process looks whether its launcher is there."""


def leave_without_launcher() -> None:
    """Ends this process when its launcher is gone, until it trains: it may have been started while that was ended."""

    def look() -> None:
        while not _trains.wait(LOOK_SECONDS):
            if abandoned():
                leave()

    if STARTED_HERE in os.environ:
        threading.Thread(target=look, daemon=True).start()


def looks_by_itself() -> None:
    """Says that this process now looks for its launcher after each step, and ends well without."""
    _trains.set()


def share_terminal() -> None:
    """Lets lines of this process follow those that processes it starts `say` there, also where its output is a file."""
    with contextlib.suppress(OSError, ValueError):  # what is no file of the system's
        place = sys.stderr.fileno()
        fcntl.fcntl(place, fcntl.F_SETFL, fcntl.fcntl(place, fcntl.F_GETFL) | os.O_APPEND)


def say(line: str, urgent: bool = False) -> None:
    """Writes a line to the user's terminal: the launcher's, where there is one and the system lets us.

    An independent replica has its own log, and only what is `urgent` goes to its launcher's terminal.
    """
    if (launcher := watcher()) and (urgent or STARTED_HERE in os.environ):
        with contextlib.suppress(OSError), Path(f"/proc/{launcher}/fd/2").open("a") as terminal:
            terminal.write(f"farflung: {line}\n")
            return
    with contextlib.suppress(OSError):  # it may lie on the very disk that is full
        sys.stderr.write(f"farflung: {line}\n")
        sys.stderr.flush()
