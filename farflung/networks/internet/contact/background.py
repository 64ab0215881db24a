"""An event loop in a thread of its own, in which no work dies unheard."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from farflung.networks.internet.contact.host import UNREACHABLE
from farflung.networks.peers.frames import plain

T = TypeVar("T")

AGAIN_SECONDS, MOST_FAULTS = 1.0, 16
"""How soon work that has failed begins again, and how many of its faults are told."""
MOST_WAITING = 256
"""Threads that wait at a time; there are as many as are needed."""


class _Loop(uvloop.Loop):  # type: ignore[misc]
    """Processes have sessions of their own: a Ctrl-C is for this one, which still needs its daemon to leave."""

    async def subprocess_exec(self, *arguments: Any, **options: Any) -> Any:
        return await super().subprocess_exec(*arguments, start_new_session=True, **options)


class Background:
    """The loop and its thread; `tell` is told in one line of work that fails."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._ending = False
        self._leaving = threading.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()
        self._loop = _Loop()
        self._loop.set_exception_handler(self._unheard)
        self._waiting = ThreadPoolExecutor(MOST_WAITING, "rounds")
        self._thread = threading.Thread(target=self._loop.run_forever, name="peers", daemon=True)

    def start(self) -> None:
        """Begins to run what is submitted."""
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Does work, and waits for it. Raises TimeoutError and what the work raises."""
        return self.submit(work).result(timeout)

    async def waiting(self, work: Callable[..., T], *args: Any) -> T:
        """Does what may wait long, apart from the loop's few threads: these are for what is done soon."""
        context = contextvars.copy_context()
        found: T = await self._loop.run_in_executor(self._waiting, context.run, work, *args)
        return found

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts work from within, which nobody waits for."""
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.look_after(task)
        return task

    def keep(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does work that never ends; begins it again when it fails, and tells of that."""

        async def kept() -> None:
            while True:
                try:
                    await work()
                    return
                except Exception as error:
                    self.tell_once(f"{what} has failed, and begins again: {error!r}")
                await asyncio.sleep(AGAIN_SECONDS)

        self.spawn(kept())

    def look_after(self, work: asyncio.Future[Any] | Future[Any]) -> None:
        """Tells when work fails that nobody waits for."""
        work.add_done_callback(self._ended)

    def end(self, last: Coroutine[Any, Any, None]) -> None:
        """Does a last piece of work, cancels the rest, and ends the thread, if that runs."""
        self._ending = True
        with self._leaving:
            if not self._thread.is_alive():
                last.close()
                return
            with contextlib.suppress(Exception):
                self.run(self._end(last), 10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        await last
        for _ in range(2):  # a task that is cancelled may begin others
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest, timeout=1)

    def _ended(self, work: asyncio.Future[Any] | Future[Any]) -> None:
        error = None if work.cancelled() else work.exception()
        if error and not self._ending:
            self.tell_once(f"a part of this peer's work has failed: {error!r}")

    def tell_once(self, fault: str) -> None:
        """Tells of a fault, unless it was told before."""
        fault = plain(fault)
        if fault not in self._told and len(self._told) < MOST_FAULTS:
            self._told.add(fault)
            self._tell(fault)

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs what has ended a task that nobody waits for, but not that the daemon has gone: who calls it is told."""
        error = context.get("exception")
        if not isinstance(error, (*UNREACHABLE, asyncio.CancelledError)) and not (error is None and self._ending):
            loop.default_exception_handler(context)
