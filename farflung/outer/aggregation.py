"""Aggregation rules for groups in which a few may lie: what bad messages among them cannot move far."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from farflung.codecs import PacketError, finite
from farflung.codecs.values import norm
from farflung.outer.averaging import Mean

LARGEST_RATIO = 30.0
"""A message with a norm so many times the usual one is refused."""
NORMS_KEPT = 32
"""Of messages of the same tensors, own ones among them; parts of a message may differ in size by far."""

Messages = list[Sequence[Tensor]]
Blame = Callable[[int, str], None]
"""Told which replica sent a bad message, and why it is bad."""


class Aggregation:
    """The aggregation rule of a network whose members cannot all be trusted; every message is looked at.

    Args:
        robust: "mean"; "median", coordinate by coordinate, and "clipped", norms of at most the median one, for
            groups of more than two, in which a minority may send anything.
        blame: told of messages that are broken, not finite or far too large; none counts.
    """

    def __init__(self, robust: str, blame: Blame) -> None:
        self.total = _TOTALS[robust]
        """Makes what sums up messages like some tensors."""
        self.whole = robust != "mean"
        """Whether each member must have everybody's message: who averages a part for all could lie about it."""
        self.blame = blame
        self._norms: dict[tuple[torch.Size, ...], deque[float]] = {}

    def check(self, sender: int, message: list[Tensor], own: Sequence[Tensor] | None) -> None:
        """Looks at a message. Raises PacketError when it cannot be true."""
        size = norm(message) if all(map(finite, message)) else math.nan
        norms = self._norms.setdefault(tuple(tensor.shape for tensor in message), deque(maxlen=NORMS_KEPT))
        if own is not None:
            norms.append(norm(own))
        usual = statistics.median([n for n in norms if n > 0] or [size])
        if not size <= LARGEST_RATIO * usual:
            raise PacketError(
                f"a message is {size / usual:.3g} times as large as usual" if size > 0 else "a message is not finite"
            )
        norms.append(size)


class Robust:
    """What `reduce` makes of all messages together; of one or two their mean."""

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
        """What has become of those taken."""
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
    """The median of each coordinate, weights aside; of an even number, the middle of the two in the middle."""
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
