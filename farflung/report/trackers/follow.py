"""Reads a run folder's events as they come, and hands them on to trackers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from farflung.errors import UserError, counted, disk_errors
from farflung.files import event_files, write_text
from farflung.report.read import Run
from farflung.report.trackers.feed import Feed
from farflung.report.trackers.known import Seat, Tracker

Replicas = Literal["first", "all"]
FIRST: Replicas = "first"
POLL_SECONDS = 2.0
CATCH_UP_SECONDS = 45.0
"""The longest that trackers may take for the rest, once a run has ended."""
LOG = Path("logs") / "trackers.log"
"""Where the trackers' own output goes, in a run folder."""


@dataclass(frozen=True)
class Outcome:
    """What came of one tracker, in a line."""

    line: str
    failed: bool = False


def follow(
    folder: Path,
    trackers: Mapping[str, Tracker],
    replicas: Replicas,
    ended: threading.Event,
    catch_up_seconds: float = CATCH_UP_SECONDS,
) -> list[Outcome]:
    """Hands on what is in a run folder, and what comes, until the run has `ended` and all is handed on.

    Returns for each tracker where the figures are, or what failed. Raises UserError.
    """
    while not (there := event_files(folder)) and not ended.wait(0.2):
        pass
    if not there:
        return []  # the run has not come to begin, and leaves no folder
    run = Run(folder)
    with _alone(folder, trackers), _output_in(folder / LOG):
        feeds: dict[tuple[str, int], Feed] = {}
        done = False
        while not done:
            done = ended.wait(POLL_SECONDS)
            run.refresh()
            for replica in _chosen(run, replicas):
                for name, tracker in trackers.items():
                    if (name, replica) not in feeds:
                        feeds[name, replica] = _begun(run, name, tracker, replica, replicas)
            _hand_on(run, feeds)
        until = time.monotonic() + catch_up_seconds
        for feed in feeds.values():
            feed.end()
        for feed in feeds.values():
            feed.join(max(0.0, until - time.monotonic()))
        return [_outcome(name, [f for (one, _), f in feeds.items() if one == name], folder) for name in trackers]


def _chosen(run: Run, replicas: Replicas) -> list[int]:
    """The replicas whose figures are handed on; a peer on the internet is the only one in its folder."""
    return [replica for replica in run.replicas if replicas == "all" or replica == 0 or run.is_one_peer]


def _begun(run: Run, name: str, tracker: Tracker, replica: int, replicas: Replicas) -> Feed:
    path = run.folder / "trackers" / "id"
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    part = "" if replicas == FIRST else f"-replica-{replica}"
    known: dict[str, Any] = {key: value for key, value in run.settings.items() if value is not None}
    seat = Seat(run.folder, run.name + part, run.name, path.read_text("utf-8") + part, "", known)
    feed = Feed(tracker, seat, run.folder / "trackers" / f"{name}{part}.json")
    feed.start()
    return feed


def _hand_on(run: Run, feeds: Mapping[tuple[str, int], Feed]) -> None:
    first = min((replica for _, replica in feeds), default=0)
    for (_, replica), feed in feeds.items():
        for row in feed.cursor.new(run.events[replica]):
            feed.give(row)
        if replica == first:  # what is of all replicas goes with the first
            for row in feed.cursor.distances(run):
                feed.give(row)


def _outcome(name: str, feeds: list[Feed], folder: Path) -> Outcome:
    again = f"hand the rest on with: farflung track {shlex.quote(str(folder))} --to {name}"
    if not feeds:
        return Outcome(f"{name}: {folder} has no events of replica 0; give --replicas all", failed=True)
    if faults := [feed.fault for feed in feeds if feed.fault]:
        return Outcome(f"{name} failed: {faults[0]}; {again}", failed=True)
    if late := [feed for feed in feeds if feed.is_alive()]:
        told = f"{name} did not take the figures of {counted(len(late), 'replica')} in time"
        return Outcome(f"{told}; {again}", failed=True)
    return Outcome(f"{name}: {feeds[0].where}")


@contextlib.contextmanager
def _alone(folder: Path, trackers: Mapping[str, Tracker]) -> Iterator[None]:
    """Keeps other processes from handing the same run on to the same trackers. Raises UserError where one does."""
    with contextlib.ExitStack() as files:
        with disk_errors(f"write to {folder}", "what trackers were given is written down there; see to it"):
            (folder / "trackers").mkdir(parents=True, exist_ok=True)
            opened = {name: (folder / "trackers" / f"{name}.lock").open("ab") for name in trackers}
        for name, file in opened.items():
            files.enter_context(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                told = f"another process hands {folder} on to {name}; wait for it, or stop it first"
                raise UserError(told) from error
        yield


@contextlib.contextmanager
def _output_in(path: Path) -> Iterator[None]:
    """Has what the trackers print in a file, for whom it concerns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        yield


def leave(code: int) -> None:
    """Ends the process at once: a tracker that hangs may have left behind what Python would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
