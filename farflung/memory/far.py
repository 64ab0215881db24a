"""Where saved tensors lie while they are not needed near: in the host's memory, or in a file."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from farflung.errors import UserError, disk_errors

REMEDY = "make room, or name another folder with --far-folder"


class Far(Protocol):
    """Room for storages. Slots are its own; those that were given back are taken again by others of their size."""

    def take(self, size: int) -> Any:
        """A slot of so many bytes. Raises UserError where there is no room."""
        ...

    def give(self, size: int, slot: Any) -> None:
        """Takes a slot back."""
        ...

    def write(self, slot: Any, near: Tensor) -> None:
        """Copies bytes (uint8, any device) into a slot. Raises UserError."""
        ...

    def read(self, slot: Any, near: Tensor) -> None:
        """Copies a slot's bytes. Raises UserError."""
        ...


class HostMemory:
    """The host's memory, `pinned` so that a GPU copies from and to it by itself."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor:
        """See Far."""
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, size: int, slot: Tensor) -> None:
        """See Far."""
        self._free[size].append(slot)

    def write(self, slot: Tensor, near: Tensor) -> None:
        """See Far. From a GPU, it is only begun."""
        slot.copy_(near, non_blocking=self._pinned)

    def read(self, slot: Tensor, near: Tensor) -> None:
        """See Far. To a GPU, it is only begun."""
        near.copy_(slot, non_blocking=self._pinned)


class FileOf:
    """A file without a name in a folder, which the system removes with the process. Raises UserError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[int, list[int]] = defaultdict(list)
        self._end = 0
        with self._errors("write to"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, it lives as long as this

    def take(self, size: int) -> int:
        """See Far."""
        if free := self._free[size]:
            return free.pop()
        slot, self._end = self._end, self._end + size
        with self._errors("write to"):
            if hasattr(os, "posix_fallocate"):  # tells at once that a disk is full; not on macOS
                os.posix_fallocate(self._file.fileno(), slot, max(size, 1))
        return slot

    def give(self, size: int, slot: int) -> None:
        """See Far."""
        self._free[size].append(slot)

    def write(self, slot: int, near: Tensor) -> None:
        """See Far."""
        left = memoryview(near.cpu().numpy().data)
        with self._errors("write to"):
            while left:
                done = os.pwrite(self._file.fileno(), left, slot)
                left, slot = left[done:], slot + done

    def read(self, slot: int, near: Tensor) -> None:
        """See Far."""
        host = near if near.device.type == "cpu" else torch.empty(near.numel(), dtype=torch.uint8)
        left = memoryview(host.numpy().data)
        with self._errors("read from"):
            while left:
                if not (done := os.preadv(self._file.fileno(), [left], slot)):
                    raise OSError("the file has been cut short")
                left, slot = left[done:], slot + done
        if host is not near:
            near.copy_(host)

    def _errors(self, what: str) -> Any:
        return disk_errors(f"{what} {self._folder}", REMEDY)


class Home(NamedTuple):
    """A tensor of the far tier, and what lets go of the host's memory that its values take while nobody uses them."""

    tensor: Tensor
    let_go: Callable[[], object]


MakeHome = Callable[[Tensor], Home]
"""Makes a home like a tensor."""


def home_in(folder: Path, like: Tensor) -> Home:
    """A home whose values, if it has any, lie in a file without a name. Raises UserError."""
    if not like.nbytes:
        return Home(torch.empty_like(like, device="cpu"), lambda: None)
    with disk_errors(f"write to {folder}", REMEDY), tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
        else:
            file.truncate(like.nbytes)
        mapped = mmap.mmap(file.fileno(), like.nbytes)
    # The file has the values still; the pages come back when they are read.
    let_go = partial(mapped.madvise, mmap.MADV_DONTNEED) if hasattr(mmap, "MADV_DONTNEED") else lambda: None
    return Home(torch.frombuffer(mapped, dtype=like.dtype).view(like.shape), let_go)


def near_home(like: Tensor) -> Home:
    """A home on the tensor's own device."""
    return Home(torch.empty_like(like), lambda: None)


def far_homes(folder: str) -> MakeHome:
    """What makes homes in a folder's files, or where it is "" in the host's memory."""
    return partial(home_in, Path(folder)) if folder else pinned_home


def pinned_home(like: Tensor) -> Home:
    """A home in the host's memory, from and to which a GPU copies by itself."""
    return Home(torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available()), lambda: None)


def flat(value: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return value.view(-1).view(torch.uint8)


def check_room(folder: Path, size: int) -> None:
    """Refuses a folder whose disk has less room than so many bytes. Raises UserError."""
    with disk_errors(f"write to {folder}", REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(f"{folder} has {free / 1e9:.3g} GB of room, and {size / 1e9:.3g} GB are to lie there; {REMEDY}")
