"""Swapping tensors through memory that the processes of one machine share."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Parts = Sequence[Sequence[Tensor]]
"""Tensors for each process of a group, or of each."""

SHARED = 1 << 26
"""Bytes that each process shares with the others, whatever it has to send."""

ALIGNED = 64
"""Bytes of a line of a processor's cache."""


class SharedMemory:
    """Swaps through a piece of memory of each process, in which there is a slot for every other process.

    What does not fit goes window by window. Each slot has two halves: one is written while others may still read the
    other, so that processes wait for each other only once a window.

    Args:
        regions: of memory, one of each process, as bytes.
        group: the processes, which wait for each other over their network.
    """

    def __init__(self, regions: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._group, self._own = group, group.rank()
        self._others = [number for number in range(len(regions)) if number != self._own]
        slots = 2 * len(self._others)
        self._bytes = len(regions[0]) // slots // ALIGNED * ALIGNED
        self._slots = [region[: slots * self._bytes].view(2, -1, self._bytes) for region in regions]
        self._half = 0

    def swap(self, outgoing: Parts, incoming: Parts, dtype: torch.dtype) -> None:
        """Fills contiguous tensors with those of the other processes; values travel in a dtype."""
        room = self._bytes // dtype.itemsize
        sent, filled = (
            {other: _windows(parts[other], room) for other in self._others} for parts in (outgoing, incoming)
        )
        window, windows = 0, 1
        while window < windows:
            for other, cut in sent.items():
                for parts in cut[window : window + 1]:
                    torch._foreach_copy_(_places(parts, self._slot(self._own, other, dtype)), parts)
            windows = self._most(max(map(len, sent.values())))
            for other, cut in filled.items():
                for parts in cut[window : window + 1]:
                    torch._foreach_copy_(parts, _places(parts, self._slot(other, self._own, dtype)))
            self._half = 1 - self._half
            window += 1

    def _slot(self, sender: int, receiver: int, dtype: torch.dtype) -> Tensor:
        return self._slots[sender][self._half, (receiver - sender - 1) % len(self._slots)].view(dtype)

    def _most(self, windows: int) -> int:
        """The most windows that a process has to send; waits until all have written what they send in this one."""
        most = torch.tensor(windows)
        dist.all_reduce(most, dist.ReduceOp.MAX, self._group)
        return int(most)


def regions(size: int, group: dist.ProcessGroup) -> list[Tensor] | None:
    """Memory of so many bytes of each process of a group; None where one of them cannot reach that of all.

    The memory is a file without a place in a folder, so that a process that dies leaves nothing behind.
    """
    name = f"farflung-{uuid.uuid4().hex}"
    created = _created(name, size)
    try:
        told: list[Any] = [None] * group.size()
        dist.all_gather_object(told, (f"/proc/{os.getpid()}/fd/{created}", name), group=group)
        found = [region for path, name in told if (region := _mapped(Path(path), name, size)) is not None]
        reached = torch.tensor(len(found))
        dist.all_reduce(reached, dist.ReduceOp.MIN, group)
        return found if reached == group.size() else None
    finally:
        if created is not None:
            os.close(created)


def _created(name: str, size: int) -> int | None:
    """A file in memory that has its memory already: later there might be too little, which ends a process."""
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not Linux
        return None
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        return None
    return file


def _mapped(path: Path, name: str, size: int) -> Tensor | None:
    """The memory that a process has created; None where it is on another machine, or in another container."""
    try:
        if str(path.readlink()) != f"/memfd:{name} (deleted)":
            return None
        with path.open("r+b", buffering=0) as opened:
            return torch.frombuffer(mmap.mmap(opened.fileno(), size), dtype=torch.uint8)
    except OSError:
        return None


def _windows(parts: Sequence[Tensor], room: int) -> list[list[Tensor]]:
    """Tensors, flat and cut, as they go through one window after the other, of so many values each."""
    windows: list[list[Tensor]] = []
    left = 0
    for part in parts:
        flat, begin, size = part.reshape(-1), 0, part.numel()
        while begin < size:
            if not left:
                windows.append([])
                left = room
            taken = min(left, size - begin)
            windows[-1].append(flat if taken == size else flat[begin : begin + taken])
            begin, left = begin + taken, left - taken
    return windows


def _places(parts: Sequence[Tensor], slot: Tensor) -> list[Tensor]:
    """Where each of the parts of a window is in its slot."""
    sizes = [part.numel() for part in parts]
    return list(torch.split(slot[: sum(sizes)], sizes))
