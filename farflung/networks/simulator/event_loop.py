"""Coroutines in virtual time: nobody really waits, and the order of events depends on the times alone."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event as soon as nothing is left to do before it."""

    def __init__(self) -> None:
        self._seconds = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._seconds

    def jump(self, seconds: float) -> None:
        """Lets virtual seconds pass."""
        self._seconds += seconds


class _Jumping(selectors.SelectSelector):
    """Waits for no file: the loop's own wake-up is never needed, since nothing happens outside it."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all coroutines wait for each other, and no time is set for any of them")
        self._loop.jump(max(timeout, 0.0))
        return []


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine, and all that it starts, in virtual time. Raises RuntimeError where all wait for each other."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
