"""Files that are there as a whole or not at all, where events lie, and folders without what is looked for."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from farflung.errors import UserError, disk_errors


def beside(path: Path) -> Path:
    """Where to write a file before it is renamed: no other process, on whatever machine, writes there."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def refuse_taken(folder: Path, remedy: str) -> None:
    """Raises UserError for a folder that is to be written, and has something in it, or no name of its own."""
    if not folder.name:
        raise UserError(f"{folder} is a place without a name, which no finished folder can take; {remedy}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; {remedy}")


def typed(path: Path) -> Path:
    """The path as one would type it: relative where it lies below the current folder."""
    here, whole = Path.cwd(), path.absolute()
    return whole.relative_to(here) if here in whole.parents else path


def event_files(folder: Path) -> list[Path]:
    """The files of events in a run folder; those of independent replicas lie in run folders of their own below it."""
    return sorted([*folder.glob("events/*.jsonl"), *folder.glob("replica-*/events/*.jsonl")])


def written_by_farflung(folder: Path) -> bool:
    """Whether a run or a simulation is in a folder, also one that has written no events yet."""
    if not any(os.access(folder / name, os.F_OK) for name in ("config.toml", "simulation.html")):
        return False
    return (folder / "logs" / "config.toml").exists() or bool(event_files(folder))


def runs_in(folder: Path) -> list[Path]:
    """A run folder itself, or those right below a folder that is none; the path itself where there are none."""
    own = folder.is_file() or written_by_farflung(folder) or event_files(folder)
    below = [] if own else [one for one in folder.glob("*/") if (one / "config.toml").exists()]
    return sorted(one for one in below if event_files(one)) or [folder]


def files_below(folder: Path) -> Iterator[Path]:
    """The files in a folder and in those below it, but for farflung's own runs, in no order.

    Links to folders are not followed.

    Raises UserError for a folder that cannot be read, and for a link to nothing: it would be left out, and nobody
    would see it.
    """
    try:
        for where, folders, names in os.walk(folder, onerror=_refuse):
            folders[:] = [name for name in folders if not written_by_farflung(Path(where, name))]
            yield from (path for name in names if is_data(path := Path(where, name)))
    except OSError as error:
        raise _closed(str(folder), error) from error


def files_named(pattern: str) -> Iterator[Path]:
    """What a glob names, files and folders; Python's leaves out, without a word, what is in folders it cannot read.

    Raises UserError for these.
    """
    parts = Path(pattern).parts
    searched = next((number for number, part in enumerate(parts) if part == "**"), len(parts))
    try:
        for number, part in enumerate(parts[: searched + 1]):
            for folder in glob.iglob(str(Path(*parts[:number]))) if glob.has_magic(part) else ():
                for _ in os.walk(folder, onerror=_refuse):
                    if number < searched:
                        break
    except OSError as error:
        raise _closed(pattern, error) from error
    yield from map(Path, glob.iglob(pattern, recursive=True))


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # what is no folder holds no files
        raise error


def _closed(data: str, error: OSError) -> UserError:
    remedy = "let this user read it, or give data that is without it"
    return UserError(f"data {data}: {error.filename}: {error.strerror}; {remedy}")


def is_data(path: Path) -> bool:
    """Whether a path is a file. Raises UserError for a link to nothing, see `files_below`."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"data {path}: this is a link to nothing; mend it, or give data that is without it")
    return path.is_file()


def holds_no_run(folder: Path, fault: str) -> str:
    """What to say of a folder that holds no run; `fault` says how that is seen, and what to do."""
    if (folder / "simulation.html").exists():
        fault = "farflung simulate has written it, which trains nothing; its pictures are in simulation.html"
    return f"{folder} holds no run: {fault}"


def lock_holders() -> dict[int, int] | None:
    """The processes of this machine that have files locked, by the files' inodes; None where the system does not say.

    Asking for a lock would tell as well, but keep a process that starts just then from its own file.
    """
    try:
        fields = [line.split() for line in Path("/proc/locks").read_text("ascii").splitlines()]
        held = [one for one in fields if len(one) >= 6 and one[1] == "FLOCK"]
        return {int(one[5].rpartition(":")[2]): int(one[4]) for one in held}
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def replacing(path: Path, private: bool = False) -> Iterator[BinaryIO]:
    """A file that is written beside its place and renamed at the end; makes the folders that it lies in.

    A `private` one can be read by its owner alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = beside(path)
    try:
        new.touch(mode=0o600 if private else 0o666)
        with new.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut may leave an empty file under the new name
        new.rename(path)
    except BaseException:
        new.unlink(missing_ok=True)  # on a full disk, what there is of it only takes up room
        raise


@contextlib.contextmanager
def new_beside(place: Path) -> Iterator[Path]:
    """Where to write a folder before it is renamed; nothing is there yet, and nothing stays. Raises UserError."""
    new = beside(place)
    with disk_errors(f"write to {place}", "give another folder, or make room"):
        try:
            shutil.rmtree(new, ignore_errors=True)  # left by one of this number that was killed, as in a container
            yield new
        finally:
            shutil.rmtree(new, ignore_errors=True)


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Writes a text file as `replacing` does."""
    with replacing(path, private) as file:
        file.write(text.encode())
