"""Measurements of a process, for its events."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator

import torch

from farflung.networks import Network


@torch.no_grad()
def sampled(parameters: list[torch.nn.Parameter], most: int) -> torch.Tensor:
    """Up to `most` of all values, evenly spread, as float64 on the CPU."""
    count = sum(parameter.numel() for parameter in parameters)
    positions = torch.linspace(0, count - 1, min(most, count), dtype=torch.float64).long()
    found, begin = [], 0
    for parameter in parameters:
        inside = positions[(positions >= begin) & (positions < begin + parameter.numel())] - begin
        found.append(parameter.flatten()[inside.to(parameter.device)].double().cpu())
        begin += parameter.numel()
    return torch.cat(found)


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
