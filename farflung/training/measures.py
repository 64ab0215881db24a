"""Measurements of a process, for its events."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from farflung.hooks.layouts import Layout
from farflung.hooks.shards import own_of
from farflung.networks import Network
from farflung.pipeline import Island


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


AT_ONCE = 1 << 22
"""Values of large tensors that are compared at a time."""


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of its GPU, or else of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def squares_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The sum of the squares of what flat tensors differ by, made of a few values at a time."""
    pairs = zip(one.split(AT_ONCE), other.split(AT_ONCE), strict=True)
    return sum(float((part - its).double().square().sum()) for part, its in pairs)


def reset_peak_memory(device: torch.device) -> None:
    """Has `peak_memory` tell from now on; where the system lets nobody ask for it, since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Rate:
    """Units (such as tokens) a second of training, leaving out the time that evaluations and checkpoints take."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._units = self._all_units = 0
        self._since = network.now()
        self._seconds = 0.0

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
        seconds = max(now - self._since, 1e-9)
        rate = self._units / seconds
        self._all_units, self._seconds = self._all_units + self._units, self._seconds + seconds
        self._units, self._since = 0, now
        return rate

    def mean(self) -> float:
        """The rate of all that was asked for so far."""
        return self._all_units / max(self._seconds, 1e-9)


class Spent:
    """Where the time of a process's training goes, in seconds.

    What steps wait for others, or for their batches, is told apart from the work in which they wait. `told` sums up
    what was told so far.
    """

    def __init__(self, network: Network, island: Island) -> None:
        self._network, self._island = network, island
        self._seconds, self.told = defaultdict[str, float](float), defaultdict[str, float](float)
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """A context whose time goes to something."""
        before = self._now()
        yield
        at, blocked, waited = (now - then for now, then in zip(self._now(), before, strict=True))
        for cause, seconds in ((what, max(at - blocked - waited, 0.0)), ("others", blocked), ("batches", waited)):
            self._seconds[cause] += seconds

    def take(self) -> dict[str, float]:
        """The seconds since this was last asked for; `rest` is what goes to nothing that has a name."""
        now = time.perf_counter()
        told = {what: round(seconds, 6) for what, seconds in self._seconds.items() if seconds > 0}
        told["rest"] = round(max(now - self._since - sum(self._seconds.values()), 0.0), 6)
        self._seconds.clear()
        self._since = now
        for what, seconds in told.items():
            self.told[what] += seconds
        return told

    def working(self) -> float:
        """A clock, in seconds, that stands still while the process waits for others or for its batches."""
        at, blocked, waited = self._now()
        return at - waited - (0.0 if self._network.timed else blocked)

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._network.traffic.seconds_blocked, self._island.waited_s


PEAKS = {
    "B200": (2250, 75),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "A10": (125, 31.2),
    "RTX 4090": (165, 82.6),
    "RTX 3090": (71, 35.6),
    "MI300X": (1307, 163),
}
"""What cards compute at best, by their names: 10^12 operations a second, dense, in bfloat16 and in float32."""


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """What a device computes at best in a precision, 10^12 operations a second; None where that is not known."""
    if device.type != "cuda":
        return None
    name = f" {torch.cuda.get_device_name(device)} "
    # "NVIDIA A10" is no A100, and "NVIDIA H100 80GB HBM3" has more words.
    known = next((peaks for card, peaks in PEAKS.items() if f" {card} " in name.replace("-", " ")), None)
    return known[precision == "float32"] if known else None
