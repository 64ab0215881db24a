"""Checkpoints written in the background: a step waits for the copy of the state alone."""

from __future__ import annotations

import copy
import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.memory.room import room
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
        self._there = folder.is_dir()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoints") if background else None
        self._writing: Future[Saved] | None = None

    def begin(self, step: int, state: Checkpoint, score: float | None) -> None:
        """Begins to write a state, which may change afterwards. The one before must have ended."""
        assert self._writing is None
        began = time.perf_counter()
        apart = self._thread is not None and _bytes_of(state) * SPARE < room(torch.device("cpu"))
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
            if self._there and not self._folder.is_dir():  # in a new one, nothing could go on without its settings
                raise FileNotFoundError(errno.ENOENT, "the run folder was moved or removed")
            self._flush()
            checkpoint.save(self._folder, step, self._stem, state)
            self._there = True
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
