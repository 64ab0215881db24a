"""Measurements of a process, for its events."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
from collections.abc import Iterator, Mapping

import torch

from farflung.hooks.layouts import Layout
from farflung.hooks.shards import own_of
from farflung.networks import Network


@torch.no_grad()
def sampled(named: Mapping[str, torch.nn.Parameter], layout: Layout, most: int) -> torch.Tensor:
    """Up to `most` of a replica's values, evenly spread, as float64 on the CPU; noughts for what is not here.

    They are the same values in every layout.
    """
    count = sum(map(math.prod, layout.outline.values()))
    positions = torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).long()
    found, begin = torch.zeros(len(positions), dtype=torch.float64), 0
    for name, shape in layout.outline.items():
        if name in layout.here:
            own, holders = own_of(named[name]).flatten(), layout.holders(name)
            rows = -(-(shape[0] if shape else 1) // len(holders))
            first = begin + rows * holders.index(layout.process) * math.prod(shape[1:])
            here = (positions >= first) & (positions < first + len(own))
            found[here] = own[(positions[here] - first).to(own.device)].double().cpu()
        begin += math.prod(shape)
    return found


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of its GPU, or else of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Rate:
    """Units (such as tokens) a second of training, leaving out the time that evaluations and checkpoints take."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._units = 0
        self._since = network.now()

    def count(self, units: int) -> None:
        """Counts units that were trained on."""
        self._units += units

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = self._network.now()
        yield
        self._since += self._network.now() - began

    def take(self) -> float:
        """The rate since this was last asked for."""
        now = self._network.now()
        rate = self._units / max(now - self._since, 1e-9)
        self._units, self._since = 0, now
        return rate
