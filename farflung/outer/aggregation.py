"""Aggregation rules for groups in which a few may lie: bad messages cannot move the result far."""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from farflung.codecs import PacketError, finite
from farflung.codecs.values import norm
from farflung.outer.averaging import Mean

LARGEST_RATIO = 30.0
"""A message is refused when it is so many times as large as usual."""
SIZES_KEPT = 32
"""Kept of each part of a message, own ones included: parts may differ greatly in size."""

Messages = list[Sequence[Tensor]]
Blame = Callable[[int, str], None]
"""Told which replica sent a bad message, and why it is bad."""


class Aggregation:
    """The aggregation rule of a network whose members cannot all be trusted.

    It checks every message; those that are broken, not finite or far too large are left out, and told to `blame`.
    `robust` is "mean", or for groups of more than two, in which a minority may send anything, "median" of each
    coordinate or "clipped" to the median norm.
    """

    def __init__(self, robust: str, blame: Blame) -> None:
        self.total = _TOTALS[robust]
        """Makes the accumulator of messages that are like given tensors."""
        self.whole = robust != "mean"
        """Whether each member needs all messages: a member that averaged a part for all could lie about it."""
        self.blame = blame
        self._sizes: dict[tuple[str, ...], deque[float]] = {}
        """The latest of each part, by its cells."""
        self._looking = threading.Lock()
        """A round that counts no more still ends, in a thread of its own, while the next one is held."""

    def expect(self, cells: Sequence[str], own: Sequence[Tensor], growth: float) -> None:
        """Takes note of this replica's own message, or its part that is these cells, as so many times as large."""
        size = _size(own) * growth
        with self._looking:
            self._sizes_of(cells).append(size)

    def check(self, cells: Sequence[str], message: list[Tensor]) -> None:
        """Checks a message, or the part of one that is these cells. Raises PacketError.

        It must be finite, and not far larger than usual: for this part, and for parts as they are. One that this
        replica has not learnt, such as the rows of rare words, may be as large as others.
        """
        size = _size(message) if finite(*message) else math.nan
        with self._looking:
            sizes = self._sizes_of(cells)
            known = [statistics.median(some) for part in self._sizes.values() if (some := [n for n in part if n > 0])]
            here = [n for n in sizes if n > 0]
            usual = max(statistics.median(here or [size]), statistics.median(known or [size]))
            if not size <= LARGEST_RATIO * usual:
                raise PacketError(
                    f"a message is {size / usual:.3g} times as large as usual"
                    if size > 0
                    else "a message is not finite"
                )
            sizes.append(size)

    def _sizes_of(self, cells: Sequence[str]) -> deque[float]:
        return self._sizes.setdefault(tuple(cells), deque(maxlen=SIZES_KEPT))


def _size(tensors: Sequence[Tensor]) -> float:
    """The root of the mean square of all values."""
    return norm(tensors) / math.sqrt(max(1, sum(tensor.numel() for tensor in tensors)))


class Robust:
    """Collects messages and reduces them together; one or two are averaged."""

    def __init__(self, reduce: Callable[[Messages, list[float]], list[Tensor]], like: Sequence[Tensor]) -> None:
        self._reduce = reduce
        self._like = like
        self._messages: Messages = []
        self._weights: list[float] = []

    def add(self, message: Sequence[Tensor], weight: float) -> None:
        """Takes one message."""
        self._messages.append(message)
        self._weights.append(weight)

    def result(self) -> list[Tensor]:
        """The reduced message."""
        if len(self._messages) > 2:
            return self._reduce(self._messages, self._weights)
        return weighted_mean(self._messages, self._weights, self._like)


def weighted_mean(messages: Messages, weights: list[float], like: Sequence[Tensor]) -> list[Tensor]:
    """See Mean."""
    total = Mean(like)
    for message, weight in zip(messages, weights, strict=True):
        total.add(message, weight)
    return total.result()


def median(messages: Messages, weights: list[float]) -> list[Tensor]:
    """The median of each coordinate, without weights; of an even number, the mean of the middle two."""
    low, high = (len(messages) - 1) // 2, len(messages) // 2
    sorted_parts = (torch.stack(parts).sort(dim=0).values for parts in zip(*messages, strict=True))
    return [(part[low] + part[high]) / 2 for part in sorted_parts]


def clipped(messages: Messages, weights: list[float]) -> list[Tensor]:
    """The weighted mean of messages whose norms are at most the median of their norms."""
    norms = [norm(message) for message in messages]
    most = statistics.median_low(norms)
    shrunk: Messages = [
        [t * min(1.0, most / max(size, 1e-30)) for t in m] for m, size in zip(messages, norms, strict=True)
    ]
    return weighted_mean(shrunk, weights, messages[0])


_TOTALS: dict[str, Callable[[Sequence[Tensor]], Mean | Robust]] = {
    "mean": Mean,
    "median": partial(Robust, median),
    "clipped": partial(Robust, clipped),
}

ROBUST = tuple(_TOTALS)
"""How messages can become one."""
