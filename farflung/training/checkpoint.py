"""Checkpoints: `checkpoints/step-000600/replica-N.pt`, or a file for each part of a replica; whole once all are there.

A file is written beside its place, flushed to the disk and renamed, so a crash at any instant leaves what was there.
No process waits for another: which step is the last whole one is found out when the run is resumed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from farflung.errors import UserError, disk_errors
from farflung.figure import Figure
from farflung.files import replacing
from farflung.formats import CHECKPOINT
from farflung.training.events import died, scores
from farflung.training.migrations import migrated
from farflung.training.stored import stored

REMOVE = "move it elsewhere, or remove it"
"""What to do with what farflung itself cannot remove."""
_PART_NAME = re.compile(r"replica-([0-9]+)(?:-part-([0-9]+)-of-([0-9]+))?")


class Weights(TypedDict):
    """One process's part of a replica's weights: what files of averaged weights hold."""

    format: NotRequired[int]
    """The version of the format, which `write` adds; files from before versions have none."""
    shard: int
    """Which shard of its stage the process is, from 0."""
    model: dict[str, Tensor]
    """The model's state_dict: parameters as this process has them, and buffers."""
    buffers: list[str]
    """The names of the buffers in it, which every shard has whole."""


class Checkpoint(Weights):
    """The state that one process resumes from. Its tensors are on the CPU when it is read."""

    replica: NotRequired[int]
    """Whose it is; earlier releases do not tell."""
    step: NotRequired[int]
    """After which step of the run; earlier releases do not tell."""
    names: list[str]
    """The names of its parameters, in the order in which the inner optimizer numbers them."""
    optimizer: dict[str, Any]
    """The inner optimizer's state_dict."""
    dealt: NotRequired[dict[str, Any]]
    """The state_dict of the optimizer of the tables that this replica has of those dealt out; empty without."""
    outer: dict[str, Any]
    """The state_dict of the rounds; in `cells` are anchors, outer state and codecs' memory of the cells kept here."""
    random: Tensor
    """The state of torch's random numbers on the CPU."""
    random_cuda: Tensor | None
    """And on the GPU, if there is one."""
    trained: int
    """Inner steps that the replica has computed itself."""
    rounds: int
    """Rounds with others so far."""
    late: dict[str, Any]
    """The state_dict of the mean of late weights."""
    data: dict[str, Any]
    """What the workload has found out of its data; earlier releases have none."""
    traffic: dict[str, float]
    """What was sent and waited for in rounds so far: the fields of Traffic, in bytes, packets and seconds."""
    boundary_traffic: dict[str, float]
    """The same from stage to stage."""
    clock: Any
    """A simulated network's clock; None on others."""
    bytes_told: int
    """Bytes sent in rounds that events have told of."""
    elapsed: float
    """Seconds since the run began, on the network's clock."""
    events_size: int
    """Bytes of the process's file of events then."""


def save(folder: Path, step: int, stem: str, state: Checkpoint) -> None:
    """Writes one process's part of a checkpoint."""
    write(path_of(folder, step, stem), state)


def write(path: Path, state: Weights) -> None:
    """Writes a file as a whole or not at all, with the version of the format."""
    try:
        with replacing(path) as file:
            _save({"format": CHECKPOINT.version, **state}, file)
    except BaseException:
        with contextlib.suppress(OSError):  # others have written there
            path.parent.rmdir()
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _save(state: Weights, file: BinaryIO) -> None:
    """As torch.save; a write that fails is an OSError, where torch tells of a position in its own format."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def average_of(folder: Path, stem: str = "replica-0") -> Path:
    """Where the weights lie, or one part of them, that were averaged over replicas once at the end."""
    return folder / "checkpoints" / f"averaged{re.sub('^replica-[0-9]+', '', stem)}.pt"


def averages(folder: Path) -> list[Path]:
    """The parts of the averaged weights, in order; empty unless all are there and whole."""
    found = {part: path for path in _averaged(folder) if (part := _part_of_average(path)) and sound(path)}
    if Part(1, 0) in found:
        return [found[Part(1, 0)]]
    parts = sorted(found)
    return [found[part] for part in parts] if parts and len(parts) == parts[0].of else []


def read(path: Path) -> Checkpoint:
    """What `write` wrote, or an earlier release, as it is written now; of averaged weights, what Weights has.

    Raises UserError when it is damaged or of a format that is not read.
    """
    return _read(path, partial(torch.load, map_location="cpu", weights_only=True))


def outline(path: Path) -> Checkpoint:
    """As `read`, but large tensors stay in the file, and are read when something is computed with them."""
    return _read(path, stored)


def _read(path: Path, load: Callable[[Path], Any]) -> Checkpoint:
    try:
        with zipfile.ZipFile(path) as file:
            if spoilt := file.testzip():  # torch itself compares no checksums
                raise ValueError(f"the checksum of {spoilt} is wrong")
        state: dict[str, Any] = load(path)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(
            f"{path} is damaged: {why}; take a copy from a backup, or remove it to use what is older"
        ) from error
    return cast(Checkpoint, migrated(state, CHECKPOINT.check(state, str(path))))


def whole(path: Path) -> bool:
    """Whether a file has its end, which a disk or a copy may have lost; its content is not read."""
    try:
        with zipfile.ZipFile(path):
            return True
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False


def sound(path: Path) -> bool:
    """Whether a file is whole, and its content is what was written, by its checksums: all of it is read, once."""
    try:
        about = path.stat()
    except OSError:
        return False
    return _sound(path, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _sound(path: Path, size: int, written: int) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return False


def damaged(folder: Path, replica: int, after: int = 0) -> list[Path]:
    """A replica's files of checkpoints that are there and not sound, of steps later than `after`."""
    steps = sorted(step for step in _steps(folder) if step > after)
    files = (path for step in steps for path in _of_replica(_folder_of(folder, step), replica, "pt"))
    # In this order: another process of the replica may be removing them.
    return [path for path in files if not sound(path) and path.exists()]


def damaged_averages(folder: Path) -> list[Path]:
    """The files of averaged weights that are not sound."""
    return [path for path in _averaged(folder) if not sound(path)]


def _averaged(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints").glob("averaged*.pt") if _part_of_average(path))


def _part_of_average(path: Path) -> Part | None:
    return _part(path.stem.replace("averaged", "replica-0", 1))


class Part(NamedTuple):
    """Which of a replica's parts a file is, and of how many."""

    of: int
    number: int


def _part(name: str) -> Part | None:
    """Which part a file is by its name; None for what farflung has not named."""
    found = _PART_NAME.fullmatch(name)
    return Part(int(found[3] or 1), int(found[2] or 0)) if found else None


def parts_of(folder: Path, step: int, replica: int) -> list[Path]:
    """The files of a replica's checkpoint at a step, in order of their parts; empty unless all are there.

    Where machines keep folders of their own, all are those of the processes that this folder has events of.
    """
    written = _written(folder, step, replica)
    told = _named(_of_replica(folder / "events", replica, "jsonl"))
    for layout in {part.of for part in written}:
        here = {part.number for part in written if part.of == layout}
        first = {0} if Part(1, 0) in told else set()
        if here >= first | {part.number for part in told if part.of == layout > 1}:
            return [written[part] for part in sorted(written) if part.of == layout]
    return []


def complete(folder: Path, step: int, replica: int) -> list[Path]:
    """The files of a replica's checkpoint, if all of its parts are in this folder, from whatever machine."""
    parts = parts_of(folder, step, replica)
    return parts if parts and len(parts) == min(_named(parts)).of else []


def steps_of(folder: Path, replica: int) -> set[int]:
    """The steps at which a replica's checkpoint is whole."""
    return {step for step in _steps(folder) if parts_of(folder, step, replica)}


def sound_steps(folder: Path, replica: int, stem: str) -> list[int]:
    """The steps that a process can go on from, by the stem of its files: its own part is sound, or all of a replica's.

    Of other parts, the processes that read them find out.
    """

    def usable(step: int) -> bool:
        own = path_of(folder, step, stem)
        parts = complete(folder, step, replica)
        return sound(own) if own.exists() and (own in parts or not parts) else bool(parts) and all(map(sound, parts))

    return sorted(filter(usable, steps_of(folder, replica)))


def last_sound(folder: Path) -> int | None:
    """The last step whose checkpoint is whole and sound, as far as this folder knows of living replicas."""
    return next((step for step in whole_steps(folder) if _all_sound(folder, step)), None)


def _all_sound(folder: Path, step: int) -> bool:
    return all(sound(path) for replica in replicas_of(folder) for path in parts_of(folder, step, replica))


def whole_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are whole, as far as this folder knows of living replicas; newest first."""
    steps = [steps_of(folder, replica) for replica in replicas_of(folder)]
    return sorted(set.intersection(*steps), reverse=True) if steps else []


def best_step(folder: Path, figure: Figure) -> tuple[int, float] | None:
    """The step of the checkpoint with the best score, as the mean of the replicas, and that score.

    None where no checkpoint is of a step at which all replicas were judged.
    """
    told = [scores(folder, replica) for replica in replicas_of(folder)]
    return best_of({step: [one.get(step) for one in told] for step in whole_steps(folder)}, figure)


def best_of(judged: Mapping[int, Sequence[float | None]], figure: Figure) -> tuple[int, float] | None:
    """The step with the best mean of its scores, and that mean; of several, the last.

    Steps of which a score is unknown or not finite do not count.
    """
    means = {step: sum(known) / len(known) for step, told in judged.items() if (known := _known(told))}
    best = min(means, key=lambda step: (figure.badness(means[step]), -step), default=None)
    return None if best is None else (best, means[best])


def _known(told: Sequence[float | None]) -> list[float]:
    """The scores, if all are known and finite; else none."""
    known = [score for score in told if score is not None and math.isfinite(score)]
    return known if len(known) == len(told) else []


def replicas_of(folder: Path) -> list[int]:
    """The living replicas that this folder knows of."""
    names = [_PART_NAME.fullmatch(path.stem) for path in (folder / "events").glob("replica-*.jsonl")]
    return sorted({int(found[1]) for found in names if found} - died(folder))


def prune(folder: Path, replica: int, before: int, best: int | None = None) -> list[str]:
    """Removes a replica's files of earlier steps, but for the best one; what stays nevertheless, and why."""
    old = [step for step in _steps(folder) if step < before and step != best]
    return [f"{fault}, of an old checkpoint; {REMOVE}" for step in old for fault in _remove(folder, step, replica)]


def forget_results(folder: Path, stem: str) -> None:
    """Removes what a run left that had ended and goes on: its averaged weights, and what tells of its end.

    Raises UserError where something stays, which would pass for the new end.
    """
    for path in (average_of(folder, stem), folder / "summary.json", folder / "sample.png"):
        with disk_errors(f"remove {path}", f"{REMOVE}, and start again"):
            path.unlink(missing_ok=True)


def forget_after(folder: Path, replica: int, step: int) -> None:
    """Removes a replica's files of later checkpoints than the one that a run goes on from.

    Raises UserError where one stays, which the run would go on from the next time.
    """
    later = [one for one in _steps(folder) if one > step]
    for fault in (fault for one in later for fault in _remove(folder, one, replica)):
        raise UserError(f"{fault}, of a later checkpoint than that of step {step}; {REMOVE}, and start again")


def path_of(folder: Path, step: int, stem: str) -> Path:
    """Where a process's part of a checkpoint lies."""
    return _folder_of(folder, step) / f"{stem}.pt"


def _written(folder: Path, step: int, replica: int) -> dict[Part, Path]:
    files = _named(_of_replica(_folder_of(folder, step), replica, "pt"))
    return {part: path for part, path in files.items() if whole(path)}


def _named(files: list[Path]) -> dict[Part, Path]:
    return {part: path for path in files if (part := _part(path.stem))}


def _unfinished(folder: Path, step: int, replica: int) -> list[Path]:
    """Unfinished files of processes that were killed while they wrote."""
    return _of_replica(_folder_of(folder, step), replica, "pt.*")


def _remove(folder: Path, step: int, replica: int) -> list[str]:
    """Removes a replica's files of a step; what stays, and why: somebody may have put a folder in a file's place."""
    faults = []
    for path in (*_of_replica(_folder_of(folder, step), replica, "pt"), *_unfinished(folder, step, replica)):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            faults.append(f"cannot remove {path}: {error.strerror}")
    with contextlib.suppress(OSError):  # not empty yet, or another process was quicker
        _folder_of(folder, step).rmdir()
    return faults


def _of_replica(folder: Path, replica: int, kind: str) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
        return [*folder.glob(f"replica-{replica}.{kind}"), *folder.glob(f"replica-{replica}-part-*.{kind}")]
    return []


def _steps(folder: Path) -> list[int]:
    names = [re.fullmatch("step-([0-9]+)", path.name) for path in (folder / "checkpoints").glob("step-*")]
    return [int(name[1]) for name in names if name]


def _folder_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"
