"""How the messages of a group become one: their mean, or what a few bad ones among them cannot move far."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from farflung.codecs import Codec, Packet, PacketError, finite
from farflung.codecs.values import norm

LARGEST_RATIO = 30.0
"""A message with a norm so many times the usual one is refused."""
NORMS_KEPT = 32
"""Of messages of the same tensors, own ones among them; parts of a message may differ in size by far."""

Messages = list[Sequence[Tensor]]
Blame = Callable[[int, str], None]
"""Told which replica sent a bad message, and why it is bad."""


class Fuse(Protocol):
    """Makes one message of packets and of the own message; says why some packets could not be used."""

    def __call__(  # noqa: D102
        self, codec: Codec, packets: Mapping[int, Packet], like: Sequence[Tensor], own: Sequence[Tensor] | None
    ) -> tuple[list[Tensor], dict[int, str]]: ...


class Fusion:
    """What is done with the messages of a group.

    Args:
        robust: "mean"; "median", coordinate by coordinate, and "clipped", norms of at most the median one, for
            groups of more than two, in which a minority may send anything.
        blame: where messages are looked at: told of those that are broken, not finite or far too large; none counts.
    """

    def __init__(self, robust: str = "mean", blame: Blame | None = None) -> None:
        self.whole = robust != "mean"
        """Whether each member must have everybody's message: who averages a part for all could lie about it."""
        self._total = _TOTALS[robust]
        self._blame = blame
        self._norms: dict[tuple[torch.Size, ...], deque[float]] = {}

    def of(self, rank: int, weights: Mapping[int, float]) -> Fuse:
        """The fusion of one round of a replica, in which messages have these weights; those without one count 1."""

        def fuse(
            codec: Codec, packets: Mapping[int, Packet], like: Sequence[Tensor], own: Sequence[Tensor] | None
        ) -> tuple[list[Tensor], dict[int, str]]:
            total, unreadable = self._total(like), {}
            for sender, packet in packets.items():
                try:
                    message = self._decoded(sender, codec, packet, like)
                    self.check(sender, message, own)
                except PacketError as error:
                    unreadable[sender] = str(error)
                    continue
                total.add(message, weights.get(sender, 1.0))
            if own is not None:
                total.add(own, weights.get(rank, 1.0))
            return total.result(), unreadable

        return fuse

    def check(self, sender: int, message: list[Tensor], own: Sequence[Tensor] | None) -> None:
        """Looks at a message, where messages are looked at. Raises PacketError when it cannot be true."""
        if self._blame is None:
            return
        size = norm(message) if all(map(finite, message)) else math.nan
        norms = self._norms.setdefault(tuple(tensor.shape for tensor in message), deque(maxlen=NORMS_KEPT))
        if own is not None:
            norms.append(norm(own))
        usual = statistics.median([n for n in norms if n > 0] or [size])
        if not size <= LARGEST_RATIO * usual:
            why = f"a message is {size / usual:.3g} times as large as usual" if size > 0 else "a message is not finite"
            self._blame(sender, why)
            raise PacketError(why)
        norms.append(size)

    def _decoded(self, sender: int, codec: Codec, packet: Packet, like: Sequence[Tensor]) -> list[Tensor]:
        try:
            # What came over the internet lies in the host's memory.
            return codec.decode(packet.to(like[0].device) if like else packet, like)
        except PacketError as error:
            if self._blame:
                self._blame(sender, str(error))
            raise


class Mean:
    """The weighted mean, summed in the order given: the one order that every network uses, for equal bits.

    Of nothing, and of messages that all count nothing, it is `like`.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = like
        self._sum = [torch.zeros_like(tensor) for tensor in like]
        self._weight = 0.0

    def add(self, message: Sequence[Tensor], weight: float) -> None:
        """Takes one message; its memory may be used again afterwards."""
        for to, tensor in zip(self._sum, message, strict=True):
            to.add_(tensor, alpha=weight)
        self._weight += weight

    def result(self) -> list[Tensor]:
        """The mean of those taken."""
        return [tensor.div_(self._weight) for tensor in self._sum] if self._weight else list(self._like)


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
