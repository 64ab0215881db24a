"""Sends and receives of torch.distributed, each awaited in a thread; none of these outlives the interpreter."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

# Gloo closes ALL of a process's connections when one operation times out, so its own limit must never
# be what ends a wait: whoever awaits an exchange keeps the deadline.
_NEVER = timedelta(days=30)

LAST_SECONDS = 3.0
"""So long a process that ends lets what is under way come to its end: others may still want what it sends."""

CONTEXTS = 8
"""Gloo has connections of their own for each network interface, of which it takes one by an operation's tag."""


class Work:
    """One send or receive with a peer; `work` is None where it failed at once."""

    def __init__(self, peer: int, work: dist.Work | None, error: str = "") -> None:
        self.peer = peer
        self.error = error
        self.cut_off: Callable[[], None] = lambda: None
        self._work = work
        self._one_waits = threading.Lock()  # Gloo would let the second of two wait for ever
        self._watch: threading.Thread | None = None

    @classmethod
    def of(cls, post: dist.P2POp, peer: int) -> Work:
        """Starts an operation with a peer."""
        try:
            work = cls(peer, post.op(post.tensor, post.peer, tag=post.tag))
        except RuntimeError as error:  # the connection is known to be broken
            return cls(peer, None, str(error))
        if (group := dist.group.WORLD) and dist.get_backend() == "gloo":
            work.cut_off = partial(_cut_off, group, post.peer)
        return work

    def failed(self) -> bool:
        """Waits for its end, however long; whether it failed."""
        with self._one_waits:
            if self._work is not None:
                _awaited.add(self)
                try:
                    self._work.wait(_NEVER)
                except RuntimeError as error:
                    self.error = str(error)
                _awaited.discard(self)
                self._work = None
        return bool(self.error)

    def watch(self) -> threading.Thread:
        """A thread that lives until its end: Gloo tells it only to those who wait."""
        if self._watch is None:
            self._watch = in_thread(self.failed)
        return self._watch


_awaited: set[Work] = set()
_threads: set[threading.Thread] = set()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """A thread that does some work with others, in this one's stream of a GPU, and that `end_all` ends."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def done() -> None:
        try:
            with torch.cuda.stream(stream):
                work()
        finally:
            _threads.discard(threading.current_thread())

    thread = threading.Thread(target=done, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def end_all(seconds: float = LAST_SECONDS) -> None:
    """Ends what is under way, after so many seconds by force; called before connections or interpreter end.

    A thread that comes back from Gloo when the interpreter is gone would abort the process.
    """
    _join(seconds)
    for work in tuple(_awaited):
        work.cut_off()
    _join(seconds)


def _join(seconds: float) -> None:
    ends = time.monotonic() + seconds
    for thread in tuple(_threads):
        thread.join(max(0.0, ends - time.monotonic()))


def _cut_off(group: dist.ProcessGroup, process: int) -> None:
    """Closes all connections, so that all waits fail: Gloo does where an operation times out, and not otherwise."""
    for tag in range(CONTEXTS):
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], process, tag).wait(timedelta(milliseconds=1))
