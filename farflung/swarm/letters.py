"""What peers of a swarm say to each other about microbatches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, order=True)
class Microbatch:
    """The name of some samples: which they are follows from the name and the run's seed alone."""

    step: int
    number: int
    stream: int = 0
    """The head whose data these are; 0 where all heads share one stream."""


@dataclass(frozen=True)
class Forward:
    """A microbatch on its way to the last stage.

    Args:
        stage: that it comes to.
        version: the steps that the weights had taken which it was computed with so far.
        counts_in: the stages whose weights learn from it; None for all. A microbatch that is run again passes
            through the others, too, and they have learnt from it before. With no stage at all, it is judged alone.
        packet: what the boundary made of the hidden states; None in a simulation of time alone.
        text: of what is judged: tokens that its first sample begins with; the scores of what may follow come back.
    """

    microbatch: Microbatch
    stage: int
    version: int
    counts_in: frozenset[int] | None = None
    packet: Any = None
    text: tuple[int, ...] | None = None

    def counts(self) -> bool:
        """Whether the weights of the stage that it comes to learn from it."""
        return self.counts_in is None or self.stage in self.counts_in

    @property
    def judged(self) -> bool:
        """Whether nobody learns from it, so that only its loss comes back."""
        return self.counts_in == frozenset()


@dataclass(frozen=True)
class Gradient:
    """A microbatch on its way back.

    Args:
        packet: what the boundary made of the gradient; None of a microbatch that is only judged, or a text's scores.
        loss: of the microbatch, by the last stage.
        behind: seconds that the peer which sends it has waited for the stages behind it.
    """

    packet: Any = None
    loss: float = 0.0
    behind: float = 0.0


class LostError(Exception):
    """A peer is gone, or does not do what it was asked."""


class FalseLetterError(LostError):
    """A peer has sent what cannot be right."""


class Call(Protocol):
    """A microbatch that was handed on to a peer. Whoever made it ends it: with `keep`, or with `drop`."""

    async def gradient(self) -> Gradient:
        """What comes back. Raises LostError."""
        ...

    async def keep(self) -> None:
        """Tells that the gradient has reached the head: what was counted stays counted."""
        ...

    def drop(self, false: str = "") -> None:
        """Tells that the gradient is not wanted: what was counted is taken back, there and behind.

        Where it is `false`, the word says why it cannot be right.
        """
        ...


class Caller(Protocol):
    """The peer that handed a microbatch on to this one."""

    async def give(self, gradient: Gradient) -> None:
        """Sends the gradient back. Raises LostError."""
        ...

    async def kept(self) -> bool:
        """Whether the gradient reached the head; False where it is not wanted, or its way back broke."""
        ...


class Post(Protocol):
    """Moves letters between peers."""

    def call(self, peer: int, forward: Forward) -> Call:
        """Hands a microbatch on."""
        ...


def ledger_of(microbatches: Iterable[Microbatch]) -> list[list[int]]:
    """The microbatches' numbers, after each stream and step."""
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for one in microbatches:
        found[one.stream, one.step].append(one.number)
    return [[*where, *sorted(numbers)] for where, numbers in sorted(found.items())]
