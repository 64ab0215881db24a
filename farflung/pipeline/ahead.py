"""What steps take, made in the background; and what a device has computed, read without holding it up."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

STEPS_AHEAD = 2
"""So many steps' batches are ready, or being made, while a step computes."""


class Ahead(Generic[T]):
    """What each step takes, made in a thread of its own while the steps before it compute.

    Args:
        make: called in the thread, once for a step: a pure function of it.
        let_go: called at the end, so that what is being made waits for nothing.
    """

    def __init__(self, make: Callable[[int], T], let_go: Callable[[], object] = lambda: None) -> None:
        self._make, self._let_go = make, let_go
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._made: dict[int, Future[T]] = {}
        self.waited_s = 0.0
        """Seconds that steps have waited for it so far."""

    def at(self, step: int) -> T:
        """What a step takes. Raises what making it has raised."""
        began = time.perf_counter()
        wanted = range(step, step + STEPS_AHEAD + 1)
        self._made = {one: self._made.get(one) or self._thread.submit(self._make, one) for one in wanted}
        try:
            return self._made.pop(step).result()
        finally:
            self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        """Ends the thread; what it is making now is waited for."""
        self._let_go()
        self._thread.shutdown(cancel_futures=True)


class OnItsWay:
    """Numbers that a device computes, on their way to the host.

    To read them waits for what computes them, but for nothing that was queued after: so the device always has work.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._there = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[float]:
        """All of them."""
        if self._there:
            self._there.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
