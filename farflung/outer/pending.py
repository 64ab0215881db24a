"""Exchanges under way, and what becomes of what they bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Generic, TypeVar

from torch import Tensor

from farflung.codecs import Packet
from farflung.networks import PeerLostError, Pending

T = TypeVar("T")
R = TypeVar("R")


class Averaged:
    """Pending exchanges of the packets of strips; the strips' mean replaces the message, once all have come."""

    def __init__(
        self,
        strips: Sequence[Pending[dict[int, Packet]]],
        message: Tensor,
        finish: Callable[[Iterable[Mapping[int, Packet]]], dict[int, str]],
        now: Callable[[], float],
        given_up: Event | None = None,
    ) -> None:
        self._strips = strips
        self._message = message
        self._finish = finish
        self._now = now
        self._given_up = given_up

    def done(self) -> bool:
        """See Pending."""
        return all(strip.done() for strip in self._strips)

    @property
    def finished_at(self) -> float:
        """See Pending."""
        return max(strip.finished_at for strip in self._strips)

    def wait(self, timeout: float) -> Tensor:
        """See Pending."""
        lost: list[PeerLostError] = []
        unreadable = self._finish(self._arriving(timeout, lost))
        if lost:
            raise PeerLostError(sorted({rank for error in lost for rank in error.ranks}), str(lost[0]))
        if unreadable:
            ranks = tuple(sorted(unreadable))
            raise PeerLostError(ranks, f"replica {ranks[0]} sent what cannot be read: {unreadable[ranks[0]]}")
        return self._message

    def _arriving(self, timeout: float, lost: list[PeerLostError]) -> Iterator[Mapping[int, Packet]]:
        """Each strip's packets when they have come; some are missing after an error, which `lost` then has."""
        ends = self._now() + timeout
        for strip in self._strips:
            try:
                yield strip.wait(max(0.0, ends - self._now()))
            except PeerLostError as error:
                lost.append(error)
                if self._given_up:
                    self._given_up.set()
                yield error.delivered


class Together(Generic[T, R]):
    """Several exchanges as one, whose result is made of theirs; each is ended while later ones are on the wire.

    Where some are lost, the result is made of the others first.
    """

    def __init__(
        self, exchanges: Sequence[Pending[T]], now: Callable[[], float], result: Callable[[list[T]], R]
    ) -> None:
        self._exchanges = exchanges
        self._pending = list(exchanges)
        self._ended: list[T] = []
        self._now = now
        self._result = result

    def done(self) -> bool:
        """See Pending."""
        return all(exchange.done() for exchange in self._pending)

    @property
    def finished_at(self) -> float:
        """See Pending."""
        return max(exchange.finished_at for exchange in self._exchanges)

    def wait(self, timeout: float) -> R:
        """See Pending."""
        ends, late, lost = self._now() + timeout, [], []
        for exchange in self._pending:
            try:
                self._ended.append(exchange.wait(max(0.0, ends - self._now())))
            except PeerLostError as error:
                late.append(exchange)
                lost.append(error)
        self._pending = late  # what has ended must not be waited for again, if this is called again
        result = self._result(self._ended)
        if lost:
            raise PeerLostError(sorted({rank for error in lost for rank in error.ranks}), str(lost[0]))
        return result
