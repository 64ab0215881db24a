"""A peer's one device: it does one thing at a time, the most urgent first."""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class Pass(enum.IntEnum):
    """What is computed; a backward pass comes first, since it frees memory here and behind."""

    BACKWARD = 0
    FORWARD = 1


class Processor:
    """Passes of a peer's stage, one after the other.

    Args:
        compute: does one, in a thread or in virtual seconds.
    """

    def __init__(self, compute: Callable[[Pass, Callable[[], T]], Awaitable[T]]) -> None:
        self._compute = compute
        self._waiting: list[tuple[Pass, int, asyncio.Future[None]]] = []
        self._number = count()
        self._busy = False
        self.computed = 0
        """Passes that it has done."""

    @property
    def queue(self) -> int:
        """Passes that wait."""
        return len(self._waiting)

    async def run(self, which: Pass, work: Callable[[], T]) -> T:
        """Does a pass when its turn comes. One that has begun comes to its end, though nobody may want it any more."""
        await self._turn(which)
        computing: asyncio.Future[T] = asyncio.ensure_future(self._compute(which, work))  # type: ignore[arg-type]
        try:
            return await asyncio.shield(computing)
        finally:
            while not computing.done():
                await asyncio.wait([computing])
            self.computed += 1
            self._next()

    async def _turn(self, which: Pass) -> None:
        if not self._busy:
            self._busy = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (which, next(self._number), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # it came in the same moment, and is handed on
            raise

    def _next(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
