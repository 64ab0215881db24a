"""What a simulated network is like: links and computation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """The same for every replica.

    Args:
        bandwidth_mbps: each replica's link, megabits a second, each way.
        latency_ms: one way, milliseconds.
        step_ms: what one inner step's computation takes, milliseconds.
    """

    bandwidth_mbps: float = 100.0
    latency_ms: float = 20.0
    step_ms: float = 100.0

    def transfer_seconds(self, nbytes: float) -> float:
        """How long a replica's link is busy with sending `nbytes`."""
        return nbytes * 8 / (self.bandwidth_mbps * 1e6)
