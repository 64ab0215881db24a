"""Stopping early, all replicas at one step, so that the checkpoint they leave is whole."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from farflung.networks.board import connected_anew
from farflung.training.terminal import abandoned

POLL_SECONDS = 1.0
"""Seconds between two checks whether the run should stop."""
AGREEMENT_SECONDS = 20.0
"""Longest wait of a stopping process for the others' answers, in seconds."""


_BEGAN = time.monotonic()


def seconds_here() -> float:
    """Seconds since this process began, but for what it had imported before."""
    return time.monotonic() - _BEGAN


class StoppedError(Exception):
    """The run ends before its last step, because it was asked to."""


class Stop:
    """A request to stop, by a signal to any process, and the agreement of all on the step.

    Whoever gets the signal says so in the store; the others look there now and then, in a thread of their own, so that
    no step waits for the store. Each process then says which step it is in, and begins no other before it knows the
    same of all. The run stops after the furthest of these steps, which nobody has passed. Until then all train on, so
    no exchange is left without its partner.

    Args:
        store: shared by all processes; this one gets a connection of its own.
        everyone: all processes, or replicas where one process has several.
        mine: those that this one answers for.
    """

    def __init__(self, store: Store, everyone: Iterable[int], mine: Iterable[int]) -> None:
        self._store = connected_anew(store)
        self._everyone = list(everyone)
        self._steps = dict.fromkeys(mine, 0)
        self._calls: queue.SimpleQueue[str] = queue.SimpleQueue()  # may be put to out of a signal handler
        self.at_once: list[Callable[[], object]] = []
        """Called when anybody has asked to stop, out of another thread: so that a step that waits for data ends."""
        self.requested = False
        """Whether this process was asked to stop."""
        self._lock = threading.Lock()
        self._answered = False
        self._settled = threading.Event()
        self._last_step: int | None = None

    def request(self, *_: Any) -> None:
        """Asks to stop; a signal handler."""
        self.requested = True
        self._calls.put("stop")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which it listens for the others' requests."""
        listener = threading.Thread(target=self._listen, daemon=True)
        listener.start()
        try:
            yield
        finally:
            self._calls.put("end")
            listener.join(POLL_SECONDS)

    def due_after(self, process: int, step: int) -> bool:
        """Whether this was the last step.

        Raises StoppedError if the others cannot be asked: there is no checkpoint then.
        """
        if abandoned():
            raise StoppedError("the launcher that started this replica is gone")
        with self._lock:
            if not (self.requested or self._answered):
                self._steps[process] = step + 1
                return False
        if self.requested and len(self._everyone) == 1:
            return True  # who trains by itself; where others take its next step with it, that may never come
        self._settled.wait(AGREEMENT_SECONDS)
        if self._last_step is None:
            raise StoppedError("not every replica answered, so the last checkpoint is the one before")
        return step >= self._last_step

    def _listen(self) -> None:
        try:
            heard = ""
            while not heard:
                heard = self._heard()
            if heard == "stop":
                for call in self.at_once:
                    call()
                self._last_step = self._agree()
        except (dist.DistError, RuntimeError):
            pass  # without the store there is no agreement; who is asked to stop says so
        finally:
            self._settled.set()

    def _heard(self) -> str:
        """What has been asked for in the last while, here or elsewhere."""
        try:
            call = self._calls.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return "stop" if self._store.check(["stop"]) else ""
        if call == "stop":
            self._store.set("stop", "")
        return call

    def _agree(self) -> int:
        with self._lock:
            self._answered = True
            steps = dict(self._steps)
        for process, step in steps.items():
            self._store.set(f"stop/{process}", str(step))
        keys = [f"stop/{process}" for process in self._everyone]
        self._store.wait(keys, timedelta(seconds=AGREEMENT_SECONDS))
        return max(int(step) for step in self._store.multi_get(keys))
