"""What is no longer needed is removed beside all else: a store that only fails to remove is not away."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from farflung.networks.folder.notes import Notes
from farflung.networks.folder.store import StoreAwayError


class Sweeper:
    """Removes objects, in a thread of its own; `tell` is told once of each fault."""

    def __init__(self, notes: Notes, tell: Callable[[str], None]) -> None:
        self._notes = notes
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "sweeping")
        self._next: Future[None] | None = None
        self._failing = False

    def sweep(self) -> None:
        """Removes now what is to be removed, and tells if that may not be. Raises StoreAwayError."""
        self._notes.sweep()
        self._failing = False
        if self._notes.staying:
            why = f"some objects may not be removed from {self._notes.store.url}"
            self._tell(f"{why}; see that this peer's access allows that, or remove the folder after the run")

    def soon(self, work: Callable[[], None] | None = None) -> None:
        """Sweeps, or does work that sweeps; nothing where another sweep waits for its turn already."""
        if self._next is None or self._next.running() or self._next.done():
            with contextlib.suppress(RuntimeError):  # this peer has left, and taken all along
                self._next = self._thread.submit(self._do, work or self.sweep)

    def close(self) -> None:
        """Begins nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, work: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            work()
        except StoreAwayError as error:  # what is left is removed after the next beat
            if self._notes.last.at > began and not self._failing:  # else the folder is away, as others tell
                self._failing = True
                self._tell(f"objects cannot be removed now: {error}; this peer trains on, and tries again")
        except Exception as error:  # no work dies unheard
            self._tell(f"a part of this peer's work has failed: {error!r}")
