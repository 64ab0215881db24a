"""The state of a replica of several processes: the first gathers it for others, and deals out what it fetches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from farflung.networks import Network
from farflung.networks.base import fact_in, fact_packet

Tensors = Mapping[str, Tensor]


class NearProcesses:
    """The processes of a replica, which call the methods alike; these raise PeerLostError.

    Args:
        near: their network; None where a replica is one process.
        seconds: how long one may keep the others waiting.
    """

    def __init__(self, near: Network | None, seconds: float) -> None:
        self._near = near
        self._seconds = seconds
        self._numbers = defaultdict[int, Iterator[int]](count)

    def gathered(self, own: Tensors) -> dict[str, Tensor]:
        """In the first process the tensors of all, as float32; in the others their own."""
        whole = dict(own)
        for near, process in self._pairs():
            whole |= self._swapped(near, process, own if near.rank else {})
        return whole

    def dealt_out(self, whole: Tensors, wants: Callable[[str], bool]) -> dict[str, Tensor]:
        """Of all tensors, which the first process has, those whose names this one `wants`."""
        own = {name: tensor for name, tensor in whole.items() if wants(name)}
        for near, process in self._pairs():
            names = self._told(near, process, list(whole))
            wanted = self._told(near, process, [name for name in names if wants(name)] if near.rank else [])
            own |= self._swapped(near, process, {name: whole[name] for name in wanted})
        return own

    def _pairs(self) -> Iterable[tuple[Network, int]]:
        """The first process with each of the others, of which this one may be one."""
        if self._near is None:
            return []
        others = [self._near.rank] if self._near.rank else self._near.members()[1:]
        return [(self._near, process) for process in others]

    def _swapped(self, near: Network, process: int, own: Tensors) -> dict[str, Tensor]:
        """The other's tensors for this one's."""
        sizes = self._told(near, process, {name: tensor.numel() for name, tensor in own.items()})
        values = [tensor.detach().flatten().to("cpu", torch.float32) for tensor in own.values()]
        told = self._heard(near, process, torch.cat(values) if values else torch.empty(0))
        return dict(zip(sizes, torch.split(told.view(torch.float32), list(sizes.values())), strict=True))

    def _told(self, near: Network, process: int, value: Any) -> Any:
        """The other's value, which JSON can hold, for this one's."""
        return fact_in(self._heard(near, process, fact_packet(value)))

    def _heard(self, near: Network, process: int, packet: Tensor) -> Tensor:
        """The other's packet for this one's."""
        key = f"state of process {process}, {next(self._numbers[process])}"
        patience_s = self._seconds * max(process, 1)  # those before it come first
        packets = near.exchange(packet.view(torch.uint8), (0, process), key).wait(patience_s)
        return packets[0 if near.rank else process]
