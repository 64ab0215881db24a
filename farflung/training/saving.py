"""Checkpoints written in the background: a step waits for the copy of the state alone."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from farflung.training import checkpoint
from farflung.training.checkpoint import Checkpoint

SPARE = 1.25
"""A copy is made where there is memory for so many times as much."""


@dataclass(frozen=True)
class Saved:
    """What has come of a checkpoint.

    Args:
        step: of which it is.
        score: what the model was judged by there, if it was.
        seconds: until it was whole on the disk.
        delayed: those of them that the step waited for.
        fault: why there is none; "" where there is one.
    """

    step: int
    score: float | None
    seconds: float
    delayed: float
    fault: str = ""


class Saving:
    """Writes one process's checkpoints, one after the other.

    Args:
        folder: the run folder.
        stem: of the process's files.
        flush: brings the events that belong to a checkpoint to the disk; raises OSError.
        background: whether a thread writes a copy of the state, where there is memory for one.
    """

    def __init__(self, folder: Path, stem: str, flush: Callable[[], None], background: bool) -> None:
        self._folder, self._stem, self._flush = folder, stem, flush
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints") if background else None
        self._writing: Future[Saved] | None = None

    def begin(self, step: int, state: Checkpoint, score: float | None) -> None:
        """Begins to write a state, which may change afterwards. The one before must have ended."""
        assert self._writing is None
        began = time.perf_counter()
        apart = self._thread is not None and _bytes_of(state) * SPARE < _free_memory()
        if self._thread and apart:
            state = copied(state, {})
            delayed = time.perf_counter() - began
            self._writing = self._thread.submit(self._write, step, state, score, began, delayed)
        else:
            self._writing = Future()
            self._writing.set_result(self._write(step, state, score, began, None))

    def ended(self, wait: bool) -> Saved | None:
        """What has come of the one that was begun, told once; None where there is none, or it is not written yet."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def close(self) -> None:
        """Waits for what is being written."""
        if self._thread:
            self._thread.shutdown()

    def _write(self, step: int, state: Checkpoint, score: float | None, began: float, delayed: float | None) -> Saved:
        fault = ""
        try:
            self._flush()
            checkpoint.save(self._folder, step, self._stem, state)
        except OSError as error:
            fault = error.strerror or str(error)
        seconds = time.perf_counter() - began
        return Saved(step, score, seconds, seconds if delayed is None else delayed, fault)


def copied(value: Any, known: dict[Any, Tensor]) -> Any:
    """A state with tensors of its own, on the CPU; those of one memory stay one. `known` is empty at first."""
    if isinstance(value, Tensor):
        place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if place not in known:
            known[place] = value.detach().to("cpu", copy=True)
        return known[place]
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, copied(one, known)) for key, one in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(copied(one, known) for one in value)
    return copy.deepcopy(value)


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_bytes_of, inside))


def _free_memory() -> float:
    """Bytes that this process can still take, as far as the system tells."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        free = 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
        return min(free, _free_in_container())
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


def _free_in_container() -> float:
    """Bytes until a container's limit, where there is one; files that it has read make room when need be."""
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        table = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return most - used + int(table["inactive_file"]) + int(table["active_file"])
    return float("inf")
