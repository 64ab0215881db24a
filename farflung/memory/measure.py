"""Counts bytes: what autograd saves, and the most that some computation holds at a time."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MMAP_THRESHOLD = -3
"""The GNU C library's number of the size from which a block is mapped by itself."""


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storage_id(tensor: Tensor) -> int:
    """What tells a tensor's storage from all others that live."""
    key: int = tensor.untyped_storage()._cdata
    return key


def staying(layer: nn.Module, shared: Any) -> set[int]:
    """The storages that are not a layer's own to move: of its weights, and of what it shares with other layers."""
    return {storage_id(tensor) for tensor in (*layer.parameters(), *layer.buffers(), *tensors_in(shared))}


class Saved(saved_tensors_hooks):
    """A context that counts the `bytes` of what autograd saves: each storage once, but for some that stay anyway."""

    def __init__(self, stays: set[int]) -> None:
        self.bytes, self._seen = 0, set(stays)
        super().__init__(self._pack, lambda saved: saved)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_id(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor.detach()  # a node that holds its own output would never go


class Held(TorchDispatchMode):
    """A context that counts the bytes of storages made in it, not on meta: the most at a time is `most`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            if storage.device.type != "meta" and storage._cdata not in before | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes()).atexit = False
        self.most = max(self.most, self.now)
        return made

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def in_use(device: torch.device) -> int:
    """Bytes that this process holds now: of its GPU, or else of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
    except OSError:  # no Linux: the most so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def return_what_is_free(device: torch.device) -> None:
    """Has the C library give blocks of a megabyte and more back to the machine, now and as they are freed.

    Where that is the memory of the `device`. The GNU library would keep larger and larger ones, up to 32 MB each.
    """
    if device.type != "cpu":
        return
    with contextlib.suppress(OSError, AttributeError):  # another library
        library = ctypes.CDLL(None)
        library.mallopt(MMAP_THRESHOLD, 1 << 20)
        library.malloc_trim(0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of all of them."""
    return sum(tensor.nbytes for tensor in tensors)
