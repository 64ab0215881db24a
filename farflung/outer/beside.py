"""A round's work beside training on a GPU: in a thread and a stream of its own, so that neither waits for the other.

training's stream  ──step──●──step──────step──────step──●──step──
                    message│                            │mean
the round's stream         └─encode─▶ host ┄wire┄ host ─▶ decode
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from farflung.networks import Pending
from farflung.networks.works import in_thread

T = TypeVar("T")

Follows = Callable[[], AbstractContextManager[None]]
"""Makes a context of a stream that follows what was queued before; at its end, all that was queued in it is done."""

LOOK_SECONDS = 0.01
"""How often a thread looks whether all has come."""


class SideStream:
    """Where a device works on rounds: a stream beside training's on a GPU, nothing special elsewhere."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def following(self, message: Tensor) -> Follows:
        """For another thread: work on a message that this one's stream has made, or is about to."""
        if not message.is_cuda:
            return nullcontext
        if message.device not in self._streams:
            self._streams[message.device] = torch.cuda.Stream(message.device)
        return partial(
            _following, self._streams[message.device], torch.cuda.current_stream(message.device).record_event()
        )


@contextmanager
def _following(stream: torch.cuda.Stream, event: torch.cuda.Event) -> Iterator[None]:
    with torch.cuda.stream(stream):
        stream.wait_event(event)
        try:
            yield
        finally:
            stream.synchronize()


class Beside(Generic[T]):
    """A Pending that a thread starts, and of which it makes the result as soon as all has come.

    Args:
        start: starts it.
        follows: the stream in which it is started, and its result made.
        now: the network's clock.
    """

    def __init__(self, start: Callable[[], Pending[T]], follows: Follows, now: Callable[[], float]) -> None:
        self.finished_at = 0.0
        self._start, self._follows, self._now = start, follows, now
        self._result: Future[T] = Future()
        self._wanted = threading.Event()
        self._waiting: tuple[Context, float] = copy_context(), 0.0

    def begin(self) -> None:
        """Starts the thread."""
        in_thread(self._run)

    def done(self) -> bool:
        """See Pending."""
        return self._result.done()

    def wait(self, timeout: float) -> T:
        """See Pending."""
        if not self._wanted.is_set():
            self._waiting = copy_context(), timeout
            self._wanted.set()
        return self._result.result()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            with self._follows():
                result = self._ended()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(result)

    def _ended(self) -> T:
        self.finished_at = self._now()  # where it cannot even be started
        pending = self._start()
        while not pending.done() and not self._wanted.wait(LOOK_SECONDS):
            pass
        context, timeout = self._waiting
        try:
            return context.run(pending.wait, timeout)
        finally:
            self.finished_at = pending.finished_at
