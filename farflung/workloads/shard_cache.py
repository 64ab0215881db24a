"""Files from other machines as tokens on this one's disk, as many as there is room for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from farflung import formats
from farflung.errors import LostDataError, UserError, disk_errors
from farflung.workloads import far, store, text
from farflung.workloads.lost import Lost
from farflung.workloads.tokenizers import Tokenizer

LONGEST_S = 3600.0
"""Seconds to wait for another process that makes tokens of the same file."""
Known = dict[str, tuple[str, int]]
"""Of each file by its address: its version, and how many tokens it has to train on."""


@dataclass(frozen=True)
class Tokens:
    """A file's tokens, flat and mapped: to train on, and held out."""

    training: NDArray[np.integer]
    held_out: NDArray[np.integer]


class ShardCache:
    """Brings files here, makes tokens of them, and removes what was used longest ago when there is no room.

    Several processes may share the folder: each file is made once. A thread of its own makes ready what will be needed.

    Args:
        folder: where tokens are kept.
        room: how many bytes of tokens there may be; what is being trained on stays beyond it.
        deadline_s: how long a source that cannot be read is asked again.
    """

    def __init__(self, folder: Path, room: int, tokenizer: Tokenizer, column: str, deadline_s: float) -> None:
        self._folder, self._room, self._deadline = folder, room, deadline_s
        self._tokenizer, self._column, self._lost = tokenizer, column, Lost(column)
        self.known: Known = {}
        self.most_open = 1
        """Files that stay mapped, and so on the disk, though room is made: those that were asked for last."""
        self._there: OrderedDict[str, Future[Tokens]] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted: SimpleQueue[tuple[str, Future[Tokens]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def tokens(self, address: str, for_steps: bool = True) -> Tokens:
        """A file's tokens, for steps or not. Raises UserError: the file has changed since, or cannot be read."""
        return self.ahead(address, for_steps).result()

    def count(self, address: str) -> int:
        """How many tokens a file has to train on; it comes here only where that is not known. Raises UserError."""
        if address not in self.known:
            self.tokens(address)
        return self.known[address][1]

    def ahead(self, address: str, for_steps: bool = True) -> Future[Tokens]:
        """Begins to make a file's tokens ready, if it has not."""
        with self._lock:
            future = self._there.get(address)
            if future is None or (future.done() and future.exception()):
                future = self._there[address] = Future()
                if self._closed and for_steps:
                    future.set_exception(LostDataError())
                self._wanted.put((address, future))
            self._there.move_to_end(address)
            while len(self._there) > self.most_open:
                self._there.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="shards", daemon=True)
                self._thread.start()
        return future

    def let_go(self) -> None:
        """Whoever waits for a file waits no longer, and gets LostDataError, as does who asks for more for steps."""
        with self._lock:
            self._closed = True
            for future in self._there.values():
                with contextlib.suppress(InvalidStateError):  # it is there already
                    future.set_exception(LostDataError())

    def _serve(self) -> None:
        while True:
            address, future = self._wanted.get()
            if future.done():  # nobody waits for it any more
                continue
            try:
                with disk_errors(f"keep tokens in {self._folder}", "make room there, or give a smaller --data-room"):
                    found = self._ready(address)
            except BaseException as error:  # for whoever needs it
                with contextlib.suppress(InvalidStateError):
                    future.set_exception(error)
            else:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(found)

    def _ready(self, address: str) -> Tokens:
        version = far.version(address, self._deadline)
        if self.known.get(address, (version, 0))[0] != version:
            raise UserError(
                f"data {address}: has changed since this run began; put back what it was, or begin a new run"
            )
        by = [formats.STORE.version, self._tokenizer.digest, self._column, address, version]
        folder = self._folder / hashlib.sha256(json.dumps(by).encode()).hexdigest()[:32]
        self._folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, LONGEST_S):
            folder.mkdir(exist_ok=True)
            made = store.whole(folder) or self._made(folder, address)
            self._lost.tell_again(made.manifest.lost)
            os.utime(folder / store.MANIFEST)
            found = Tokens(made.training, made.held_out)
        self.known[address] = (version, len(found.training))
        return found

    def _made(self, folder: Path, address: str) -> store.Store:
        (folder / store.MANIFEST).unlink(missing_ok=True)
        for left in folder.glob(f"{far.ARRIVED}*"):  # by a process that was killed
            left.unlink()
        raw = far.fetch(address, folder, self._deadline)
        self._make_room(raw.stat().st_size, folder)
        try:
            documents = text.documents_of(raw, address, self._column, self._lost)
            lost = partial(self._lost.told, address)
            return store.write(folder, documents, self._tokenizer, None, lambda *_: None, lost=lost)
        finally:
            raw.unlink()

    def _make_room(self, wanted: int, made: Path) -> None:
        """Removes the tokens that were used longest ago, but of no file that is being made or mapped."""
        others = [folder for folder in self._folder.iterdir() if folder.is_dir() and folder != made]
        kept = sorted((_used(folder), _size(folder), folder) for folder in others)
        over = sum(size for _, size, _ in kept) + wanted - self._room
        for _, size, folder in kept:
            if over > 0 and size:
                with contextlib.suppress(Timeout), _locked(folder, 0):
                    for path in _files(folder):
                        path.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # it holds something else
                        folder.rmdir()
                    over -= size


def _used(folder: Path) -> float:
    """When a file's tokens were last asked for, or begun; whoever makes them holds their lock."""
    for path in (folder / store.MANIFEST, folder):
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime
    return math.inf  # another process has just removed them


def _size(folder: Path) -> int:
    sizes = 0
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            sizes += path.stat().st_size
    return sizes


def _files(folder: Path) -> list[Path]:
    """What a file's tokens consist of, and what a process that was killed has left of it; the manifest first."""
    return [folder / name for name in (store.MANIFEST, store.PROGRESS, *store.TEXT)] + [*folder.glob(f"{far.ARRIVED}*")]


def _locked(folder: Path, longest_s: float) -> FileLock:
    """A lock. Its empty file stays: who waits may have it open already, and would lock what others no longer see."""
    return FileLock(folder.with_suffix(".lock"), timeout=longest_s)
