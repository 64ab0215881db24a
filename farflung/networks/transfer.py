"""What networks of real machines have alike: a clock, and transfers in another thread, while the replica trains."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Generic, TypeVar

from torch import Tensor

from farflung.networks.base import Group, Packets, PeerLostError, Traffic
from farflung.networks.board import Board

T = TypeVar("T")

IN_BACKGROUND: ContextVar[bool] = ContextVar("in background", default=False)
"""Whether this wait blocks no training."""

GONE: ContextVar[Callable[[], bool] | None] = ContextVar("gone", default=None)
"""Says whether somebody who is waited for is known not to come."""

LOOK_SECONDS = 0.5
"""How often a wait asks that."""


class RealNetwork:
    """What networks of real machines have alike: the wall clock, and names for the others."""

    rank: int
    timed = None
    board: Board | None = None
    worth_a_packet = 0

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._attachments = itertools.count()

    def address(self, rank: int) -> str:
        """A replica's name in messages."""
        raise NotImplementedError

    def attachment(self) -> int:
        """See Network."""
        return next(self._attachments)

    def advance(self) -> None:
        """Nothing: the wall clock has already advanced."""

    def now(self) -> float:
        """The process's monotonic clock, seconds."""
        return time.monotonic()


class Transfer(Generic[T]):
    """A Pending; the worker reports lost members to it, and in the end the result."""

    def __init__(self, network: RealNetwork, group: Group) -> None:
        self.group = group
        self.others = [rank for rank in group if rank != network.rank]
        self.delivered: Packets = {}
        self.lost: dict[int, str] = {}
        self.finished_at = math.inf
        self._network = network
        self._result: Future[T] = Future()

    def finish(self, result: T) -> None:
        """Ends it well."""
        self.finished_at = self._network.now()
        self._result.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, which `wait` raises."""
        self.finished_at = self._network.now()
        self._result.set_exception(error)

    def done(self) -> bool:
        """See Pending."""
        return self._result.done()

    def wait(self, timeout: float) -> T:
        """See Pending."""
        network, gone = self._network, GONE.get()
        began = network.now()
        try:
            while (left := began + timeout - network.now()) > 0 and not self.done() and not (gone and gone()):
                futures.wait([self._result], min(left, LOOK_SECONDS) if gone else left)
            if self.done():
                return self._result.result()
            self.finished_at = network.now()
            late = self.late()
            names = ", ".join(map(network.address, late))
            raise PeerLostError(
                late,
                f"{names} did not deliver within {timeout:g} s; "
                f"see whether {'it is' if len(late) == 1 else 'they are'} running and can be reached, "
                "or raise the deadline",
                dict(self.delivered),
            )
        finally:
            if not IN_BACKGROUND.get():
                network.traffic.seconds_blocked += network.now() - began

    def late(self) -> list[int]:
        """Those who have not delivered yet."""
        return [rank for rank in self.others if rank not in self.delivered]

    def all_with(self, own: Tensor) -> Packets:
        """Every member's packet, in the group's order. Raises PeerLostError."""
        self.delivered[self._network.rank] = own
        self.raise_if_lost()
        return {rank: self.delivered[rank] for rank in self.group}

    def all_received(self) -> Packets:
        """The others' packets, in the group's order. Raises PeerLostError."""
        self.raise_if_lost()
        return {rank: self.delivered[rank] for rank in self.others}

    def raise_if_lost(self) -> None:
        """Raises PeerLostError, naming them, if anybody was lost."""
        if self.lost:
            reasons = (f"{self._network.address(rank)}: {reason}" for rank, reason in sorted(self.lost.items()))
            raise PeerLostError(sorted(self.lost), f"lost {'; '.join(reasons)}", dict(self.delivered))
