"""How the processes of a group give each other tensors: through memory where they share it, else as messages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from farflung.hooks.shared_memory import SHARED, Parts, SharedMemory, regions


class Swaps:
    """Swaps among the processes of a group, all of which call it alike."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, outgoing: Parts, incoming: Parts, like: Tensor) -> None:
        """See Layout.swap."""
        own, size = self._group.rank(), self._group.size()
        memory = self._memory if size > 1 and like.device.type == "cpu" else None
        if size > 1 and memory is None:
            swapped(outgoing, incoming, like, self._group)
            return
        copied(outgoing[own], incoming[own])
        if memory:
            flat = [[to.contiguous() for to in parts] for parts in incoming]
            memory.swap(outgoing, flat, like.dtype)
            for parts, targets in zip(flat, incoming, strict=True):
                copied(parts, targets)

    @cached_property
    def _memory(self) -> SharedMemory | None:
        found = regions(SHARED, self._group)
        return SharedMemory(found, self._group) if found else None


def copied(parts: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    """Gives tensors the values of others, unless they are the same ones."""
    for part, target in zip(parts, targets, strict=True):
        if part is not target:
            target.copy_(part)


def swapped(outgoing: Parts, incoming: Parts, like: Tensor, group: dist.ProcessGroup) -> None:
    """See Layout.swap: all in one message from each to each."""
    sent = torch.cat([like.new_empty(0), *(part.reshape(-1).to(like) for parts in outgoing for part in parts)])
    to_come, to_go = ([sum(part.numel() for part in parts) for parts in each] for each in (incoming, outgoing))
    received = sent.new_empty(sum(to_come))
    dist.all_to_all_single(received, sent, to_come, to_go, group=group)
    targets = [target for parts in incoming for target in parts]
    parts = torch.split(received, [target.numel() for target in targets])
    copied((part.view_as(target) for part, target in zip(parts, targets, strict=True)), targets)
