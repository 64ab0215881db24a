"""Writing one replica's events, line by line, for reports and live views."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from io import FileIO
from pathlib import Path

from farflung.errors import UserError
from farflung.events import EndEvent, Event, events_in, line_of


class EventLog:
    """One process's `events/replica-N.jsonl`, held by one process at a time.

    Args:
        stem: the name of the process's files, without suffix.
        clock: the network's clock; events carry the seconds since the run began on it.
        keep: the bytes of an earlier part of the run that stay; None starts a new run, and refuses an old one.
        elapsed_s: how many seconds the run had lasted at the end of that part.

    Raises UserError where the folder holds a run already, or another process is writing to it.
    """

    def __init__(
        self,
        folder: Path,
        replica: int,
        stem: str,
        clock: Callable[[], float],
        keep: int | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        path = folder / "events" / f"{stem}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if keep is None and path.exists():
            raise holds_a_run(folder)
        self._file = locked(path)
        if keep is not None:
            self._file = _begun_again(path, keep)
        self._unwritten = b""
        self._replica = replica
        self._clock = clock
        self.origin = clock() - elapsed_s
        """When the run began, on the network's clock."""

    def write(self, event: Event) -> None:
        """Appends one event of this replica and moment. On a full disk, it is kept in memory until there is room."""
        told = replace(event, replica=self._replica, at=round(self.elapsed_s(), 6))
        self._unwritten += line_of(told) + b"\n"
        with contextlib.suppress(OSError):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def elapsed_s(self) -> float:
        """Seconds since the run began, on the network's clock."""
        return self._clock() - self.origin

    def size(self) -> int:
        """Bytes written so far, safe on disk: what `keep` takes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


def locked(path: Path) -> FileIO:
    """The file, to append to, for this process alone. Raises UserError."""
    file = FileIO(path, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        folder = path.parent.parent
        raise UserError(f"{folder} is being trained by another process; wait for it, or stop it first") from error
    return file


def _begun_again(path: Path, keep: int) -> FileIO:
    """The file with its first `keep` bytes only, as a new file: whoever reads the old one notices."""
    with path.open("rb") as old:
        kept = old.read(keep)
    if len(kept) < keep:
        kept = b"".join(kept.rpartition(b"\n")[:2])  # somebody has cut it, perhaps within a line
    beside = path.with_suffix(".tmp")
    beside.unlink(missing_ok=True)
    file = locked(beside)
    while kept:
        kept = kept[file.write(kept) :]
    beside.replace(path)
    return file


def holds_a_run(folder: Path) -> UserError:
    """The error of a new run in an old run's folder."""
    return UserError(
        f"{folder} already holds a run; choose another folder with --out, or go on with: {resume_command(folder)}"
    )


def resume_command(folder: Path) -> str:
    """The command that resumes the run in a folder."""
    return f"farflung train --resume {shlex.quote(str(folder))}"


def tell_of_training(folder: Path) -> bool:
    """Whether the events in a run folder tell of any inner step."""
    return any(event.step > 0 for path in folder.glob("events/*.jsonl") for event in _whole_lines(path))


def died(folder: Path) -> set[int]:
    """The simulated replicas whose machines have stopped for good."""
    ends = [event for path in folder.glob("events/replica-*.jsonl") for event in _whole_lines(path)[-1:]]
    return {event.replica for event in ends if isinstance(event, EndEvent) and event.reason == "died"}


def tell_death(path: Path) -> None:
    """Adds to the events of a process that was killed that it will not come back."""
    if last := _whole_lines(path)[-1:]:
        end = EndEvent(replica=last[0].replica, at=last[0].at, step=last[0].step, reason="died")
        with locked(path) as file:
            file.write(b"\n" + line_of(end) + b"\n")  # its last line may not be whole


def _whole_lines(path: Path) -> list[Event]:
    return events_in(path.read_bytes().rpartition(b"\n")[0], str(path))[0]
