"""Copies between near and far beside the computing: on streams of a GPU, or in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from farflung.memory.far import Far, HostMemory

Arrival = Callable[[], Any]
"""Lets what is computed from now on come after a copy. Raises UserError where that has failed."""


class Copies(Protocol):
    """One copy out and one in at a time, at once; each in the order in which they were asked for."""

    far: Far

    def out(self, slot: Any, near: Tensor) -> Arrival:
        """Begins to copy bytes out; they may be freed once their arrival was called."""
        ...

    def back(self, slot: Any, near: Tensor) -> Arrival:
        """Begins to copy bytes back; they can be used once their arrival was called."""
        ...


class Threads:
    """Copies by two threads, to anything: from a device of any kind, once it has computed what is copied."""

    def __init__(self, far: Far, device: torch.device) -> None:
        self.far = far
        self._out, self._in = (ThreadPoolExecutor(1, f"farflung-copies-{way}") for way in ("out", "in"))
        # A thread's copies must not wait for all that the device is asked to compute.
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]

    def out(self, slot: Any, near: Tensor) -> Arrival:
        """See Copies."""
        return self._out.submit(self._copied, self.far.write, slot, near, self._streams[0], _now(near)).result

    def back(self, slot: Any, near: Tensor) -> Arrival:
        """See Copies."""
        return self._in.submit(self._copied, self.far.read, slot, near, self._streams[1], _now(near)).result

    @staticmethod
    def _copied(copy: Callable[[Any, Tensor], None], slot: Any, near: Tensor, stream: Any, computed: Any) -> None:
        if stream is None:
            copy(slot, near)
            return
        computed.synchronize()
        with torch.cuda.stream(stream):
            copy(slot, near)
            stream.synchronize()


class Streams:
    """Copies by two streams of a GPU, from and to pinned memory; the host waits for none."""

    def __init__(self, far: HostMemory, device: torch.device) -> None:
        self.far: Far = far
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, slot: Any, near: Tensor) -> Arrival:
        """See Copies."""
        return self._copied(self._out, self.far.write, slot, near)

    def back(self, slot: Any, near: Tensor) -> Arrival:
        """See Copies."""
        return self._copied(self._in, self.far.read, slot, near)

    @staticmethod
    def _copied(stream: Any, copy: Callable[[Any, Tensor], None], slot: Any, near: Tensor) -> Arrival:
        stream.wait_event(_now(near))
        with torch.cuda.stream(stream):
            copy(slot, near)
            arrived = stream.record_event()
        # The bytes are freed after this wait in the stream that computes, which is the only one to use them again.
        return lambda: torch.cuda.current_stream(near.device).wait_event(arrived)


def _now(near: Tensor) -> Any:
    """What a device has been asked to compute so far."""
    return torch.cuda.current_stream(near.device).record_event() if near.is_cuda else None


def copies_of(device: torch.device, far: Far) -> Copies:
    """What copies between a device and a far tier best."""
    return Streams(far, device) if device.type == "cuda" and isinstance(far, HostMemory) else Threads(far, device)
