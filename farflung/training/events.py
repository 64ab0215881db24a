"""Writing one replica's events, line by line, for reports and live views."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from farflung.errors import UserError, counted, disk_errors
from farflung.events import EndEvent, EvaluationEvent, Event, RoundEvent, WarningEvent, events_in, line_of
from farflung.files import lock_holders
from farflung.outer import Round
from farflung.pipeline import Island
from farflung.training.terminal import WATCHED_BY, say

MOST_WAITING = 1 << 14
"""Lines that wait for room on the disk, at most; of more, every second is left out."""
ENDING_SECONDS = 10.0
"""How long to wait for a process that has a run: one whose launcher was killed soon notices, and ends."""
MAKE_ROOM = "training goes on; make room: what waits is then written, and the next checkpoint"


class EventLog:
    """One process's `events/replica-N.jsonl`, held by one process at a time.

    Args:
        stem: the name of the process's files, without suffix.
        clock: the network's clock; events carry the seconds since the run began on it.
        keep: the bytes of an earlier part of the run that stay; None starts a new run, and refuses an old one.
        elapsed_s: how many seconds the run had lasted at the end of that part.

    On a full disk, lines wait in memory until there is room; the file has whole lines only.

    Raises UserError where the folder holds a run already, cannot be written, or another process is writing to it.
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
        if keep is None and path.exists():
            raise holds_a_run(folder)
        with disk_errors(f"write to {folder}", "see to it, and start again"):
            path.parent.mkdir(parents=True, exist_ok=True)
            before = _state_of(path)
            self._file = locked(path)
            if _state_of(path) != before:  # where this one goes on from was found out before
                self._file.close()
                raise holds_a_run(folder) if keep is None else _trained_until_now(folder)
            if keep is not None:
                self._file = _begun_again(path, keep)
        self._folder = folder
        self._waiting: list[bytes] = []
        self._left_out = 0
        self._replica = replica
        self._clock = clock
        self.origin = clock() - elapsed_s
        """When the run began, on the network's clock."""

    def write(self, event: Event) -> None:
        """Appends one event of this replica and moment, once there is room."""
        if self._left_out and self._write_waiting():
            told = f"{counted(self._left_out, 'event')} left out: there was no room in {self._folder}"
            self._left_out = 0
            self._wait(WarningEvent(step=event.step, message=told))
        self._wait(event)
        self._write_waiting()

    def round(self, ended: Round) -> None:
        """Appends the event of a round that was applied."""
        values = {**vars(ended)}
        del values["missing"]  # of which the reason tells
        for moment in ("started", "finished", "waited_from", "landed"):
            values[moment] -= self.origin
        self.write(RoundEvent(**values))

    def _wait(self, event: Event) -> None:
        if len(self._waiting) >= MOST_WAITING:
            before = len(self._waiting)
            del self._waiting[1::2]  # evenly, so that curves keep their shape; the first line may begin the run
            self._left_out += before - len(self._waiting)
        told = replace(event, replica=self._replica, at=round(self.elapsed_s(), 6))
        self._waiting.append(line_of(told) + b"\n")

    def _write_waiting(self) -> bool:
        """Writes the lines that there is room for; whether there was for all."""
        written = 0
        for line in self._waiting:
            if fault := self._fault_in_writing(line):
                _tell_once(f"cannot write to {self._folder}: {fault}; {MAKE_ROOM}")
                break
            written += 1
        del self._waiting[:written]
        return not self._waiting

    def _fault_in_writing(self, line: bytes) -> str:
        """Why a line could not be written, of which then nothing is in the file; "" where it is."""
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) == len(line):
                return ""
            fault = os.strerror(errno.ENOSPC)
        except OSError as error:
            fault = error.strerror or str(error)
        with contextlib.suppress(OSError):
            self._file.truncate(end)
        return fault

    def elapsed_s(self) -> float:
        """Seconds since the run began, on the network's clock."""
        return self._clock() - self.origin

    def size(self) -> int:
        """Bytes written so far: what `keep` takes, once they are flushed to the disk."""
        return self._file.seek(0, os.SEEK_END)

    def flush_to_disk(self) -> None:
        """Returns when all that was written is safe on the disk; any thread may call it. Raises OSError."""
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Writes what still waits for room. Raises OSError where there is none."""
        if not self._write_waiting():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Writes what still waits, where there is room, and lets go of the file."""
        self._write_waiting()
        self._file.close()


def event_log(
    folder: Path, island: Island, clock: Callable[[], float], saved: Mapping[str, Any] | None, resumed: bool
) -> EventLog:
    """A process's log, called after its replica where it leads that; it goes on from a checkpoint that was saved."""
    replica, stem = island.coordinates.replica, island.mesh.file_stem(island.coordinates)
    if island.mesh.part(island.coordinates) == 0:
        stem = f"replica-{replica}"
    keep = saved["events_size"] if saved else 0 if resumed else None
    return EventLog(folder, replica, stem, clock, keep, saved["elapsed"] if saved else 0.0)


@functools.cache
def _tell_once(line: str) -> None:
    if WATCHED_BY in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":  # others have the same folder
        say(line, urgent=True)


def locked(path: Path) -> FileIO:
    """The file, to append to, for this process alone. Raises UserError."""
    last = time.monotonic() + ENDING_SECONDS
    while True:
        file = FileIO(path, "a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):  # who goes on with a run puts a new file in its place
                return file
        except OSError as error:
            if time.monotonic() > last:
                folder, held_by = path.parent.parent, _holder(path)
                told = f"{folder} is being trained by another process{held_by}; wait for it, or stop it first"
                raise UserError(told) from error
        file.close()
        time.sleep(0.05)


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """Which process of this machine has a file locked, where the system tells."""
    process = (lock_holders() or {}).get(path.stat().st_ino, 0)
    return f" (number {process} on {socket.gethostname()})" if process > 0 else ""


def _state_of(path: Path) -> tuple[int, int] | None:
    """Which file is there, and its size; both change while it is written to, and None stays where there is none."""
    if not path.exists():
        return None
    about = path.stat()
    return (about.st_ino, about.st_size) if about.st_size else None


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


def _trained_until_now(folder: Path) -> UserError:
    return UserError(f"{folder} was trained by another process until now; start again, to go on from there")


def holds_a_run(folder: Path) -> UserError:
    """The error of a new run in an old run's folder."""
    return UserError(
        f"{folder} already holds a run; choose another folder with --out, or go on with: {_go_on_command(folder)}"
    )


def _go_on_command(folder: Path) -> str:
    """The command that goes on with the run in a folder, which may be that of a peer on the internet."""
    return join_command(folder) if (folder / "peer.key").exists() else resume_command(folder)


def resume_command(folder: Path) -> str:
    """The command that resumes the run in a folder."""
    return f"farflung train --resume {shlex.quote(str(folder))}"


def join_command(folder: Path, *flags: str, ticket: Path | None = None) -> str:
    """The command that joins with a ticket, by default with the one that the run folder keeps."""
    return f"farflung join {shlex.join([str(ticket or folder / 'run.ticket'), '--out', str(folder), *flags])}"


def tell_of_training(paths: Iterable[Path]) -> bool:
    """Whether files of events tell of any inner step."""
    return any(event.step > 0 for path in paths for event in _whole_lines(path))


def died(folder: Path) -> set[int]:
    """The simulated replicas whose machines have stopped for good."""
    ends = [event for path in folder.glob("events/replica-*.jsonl") for event in _whole_lines(path)[-1:]]
    return {event.replica for event in ends if isinstance(event, EndEvent) and event.reason == "died"}


def scores(folder: Path, replica: int) -> dict[int, float]:
    """What a replica was judged by so far, by the step; what was not finite is left out."""
    path = folder / "events" / f"replica-{replica}.jsonl"
    told = _whole_lines(path) if path.exists() else []
    judged = [event for event in told if isinstance(event, EvaluationEvent)]
    return {event.step: event.score for event in judged if event.score is not None}


def tell_death(path: Path) -> None:
    """Adds to the events of a process that was killed that it will not come back."""
    if last := _whole_lines(path)[-1:]:
        end = EndEvent(replica=last[0].replica, at=last[0].at, step=last[0].step, reason="died")
        with locked(path) as file, contextlib.suppress(OSError):  # a full disk ends no other replica
            file.write(b"\n" + line_of(end) + b"\n")  # its last line may not be whole


def _whole_lines(path: Path) -> list[Event]:
    return events_in(path.read_bytes().rpartition(b"\n")[0], str(path))[0]
