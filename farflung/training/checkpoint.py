"""Checkpoints: `checkpoints/step-000600/replica-N.pt`, whole once every replica's file is there.

A file is written beside its place, flushed to the disk and renamed, so a crash at any instant leaves what was there.
No replica waits for another: which step is the last whole one is found out when the run is resumed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch


def save(folder: Path, step: int, replica: int, state: dict[str, Any]) -> None:
    """Writes one replica's part of a checkpoint. `state` holds tensors, numbers, strings and containers of them."""
    write(path_of(folder, step, replica), state)


def write(path: Path, state: dict[str, Any]) -> None:
    """Writes a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def average_of(folder: Path) -> Path:
    """Where the weights lie that were averaged over replicas once at the end."""
    return folder / "checkpoints" / "averaged.pt"


def load(folder: Path, step: int, replica: int) -> dict[str, Any]:
    """One replica's part of a checkpoint, on the CPU."""
    return read(path_of(folder, step, replica))


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote, on the CPU."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def steps_of(folder: Path, replica: int) -> set[int]:
    """The steps at which a replica's part of a checkpoint is in this folder."""
    paths = (folder / "checkpoints").glob(f"step-*/replica-{replica}.pt")
    return {int(path.parent.name.removeprefix("step-")) for path in paths}


def whole_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are whole, as far as this folder knows of replicas; newest first."""
    replicas = [int(path.stem.removeprefix("replica-")) for path in (folder / "events").glob("replica-*.jsonl")]
    steps = [steps_of(folder, replica) for replica in replicas]
    return sorted(set.intersection(*steps), reverse=True) if steps else []


def prune(folder: Path, replica: int, keep: int) -> None:
    """Removes a replica's parts that are older than the newest `keep` whole checkpoints."""
    whole = whole_steps(folder)
    if len(whole) >= keep:
        for step in steps_of(folder, replica):
            if step < whole[keep - 1]:
                path = path_of(folder, step, replica)
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # not empty yet, or another replica was quicker
                    path.parent.rmdir()


def forget_after(folder: Path, replica: int, step: int) -> None:
    """Removes a replica's parts of later checkpoints than the one that a run goes on from."""
    for later in steps_of(folder, replica):
        if later > step:
            path_of(folder, later, replica).unlink(missing_ok=True)


def path_of(folder: Path, step: int, replica: int) -> Path:
    """Where a replica's part of a checkpoint lies."""
    return folder / "checkpoints" / f"step-{step:06d}" / f"replica-{replica}.pt"
