"""The clock by which rounds go where replicas are of unlike speeds."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable
from numbers import Real

from farflung.durations import TICKS_PER_SECOND
from farflung.errors import UserError
from farflung.hooks.start import all_there
from farflung.networks import Network
from farflung.networks.base import fact_in, fact_packet

SLACK = 1e-6
"""Of a tenth of a second: so much may be missing, since sums of steps are rounded."""
STILL = 1000
"""So often is the time looked at, before a clock that has not moved is told of."""

log = logging.getLogger("farflung")


class Clock:
    """Counts tenths of a second since the replicas of a run began together; where the run does, it stops.

    Args:
        now: seconds, from any moment on.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._tell = now
        self._elapsed_s = 0.0
        self._began: float | None = None
        self._latest = -math.inf
        self._set_back = 0.0
        self._same = 0  # how often, one after the other, the time was the same

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far. Raises UserError where what tells the time tells none."""
        return self._elapsed_s if self._began is None else self._now() - self._began

    def _now(self) -> float:
        """The time; where it is set back, as a machine's clock may be, it goes on from what it was."""
        told = self._tell()
        if not (isinstance(told, Real) and math.isfinite(told)):
            raise UserError(f"the clock has told {told!r}; let it tell seconds, such as time.monotonic does")
        now = told + self._set_back
        if now < self._latest:
            self._set_back += self._latest - now
            now = self._latest
        self._same = self._same + 1 if now == self._latest else 0
        if self._same == STILL:
            log.warning("the clock stands still at %g s, so that no round comes; look at what tells the time", told)
        self._latest = now
        return now

    @property
    def ticks(self) -> int:
        """Whole tenths of a second of the run so far."""
        return math.floor(self.elapsed_s * TICKS_PER_SECOND + SLACK)

    def begin(self, network: Network, key: str, deadline_s: float) -> None:
        """Begins, or goes on from the time that was `set`, unless it runs; where replicas stay, when all are there.

        Raises PeerLostError.
        """
        if self._began is not None:
            return
        if not (network.timed or network.elastic):  # each process has a clock of its own, and may have started anew
            self._elapsed_s = _median_of_all(network, self._elapsed_s, key, deadline_s)
        self._began = self._now() - self._elapsed_s

    def set(self, elapsed_s: float) -> None:
        """Stops, at so many seconds of the run."""
        self._elapsed_s, self._began = elapsed_s, None

    def jump(self, ticks: int) -> None:
        """Goes on from another time, unless it is this already."""
        if ticks != self.ticks:
            self._began = self._now() - ticks / TICKS_PER_SECOND


def _median_of_all(network: Network, own_s: float, key: str, deadline_s: float) -> float:
    """The median of what all replicas say, of islands all processes. Raises PeerLostError."""
    everyone = network.islands.everyone() if network.islands else network
    pending = everyone.exchange(fact_packet(own_s), everyone.members(), key)
    told: list[float] = [fact_in(word) for word in all_there(everyone, pending, deadline_s).values()]
    return statistics.median_low(told)
