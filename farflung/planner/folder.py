"""What rounds through a folder take, and cost at a store's prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.networks.peers.circles import IN_TURN, SMALL, circles, passes

WRITES, LISTINGS = 2, 4
"""What a replica writes in each round besides bundles, a note and a packet; and how often it looks who has come."""


@dataclass(frozen=True)
class Folder:
    """A store through which replicas meet; unless told, at the list prices of S3 Standard in us-east-1 in 2026.

    Args:
        latency_ms: until a request is answered.
        per_1000_writes: the price of so many writes or listings; removals are free.
        per_1000_reads: the price of so many reads.
        per_gb_out: the price of each gigabyte that is read.
        currency: of these.
    """

    latency_ms: float = 50.0
    per_1000_writes: float = 0.005
    per_1000_reads: float = 0.0004
    per_gb_out: float = 0.09
    currency: str = "USD"

    def price(self, writes: float, reads: float, nbytes: float) -> float:
        """Of so many requests, which read so many bytes."""
        return writes * self.per_1000_writes / 1e3 + reads * self.per_1000_reads / 1e3 + nbytes * self.per_gb_out / 1e9


@dataclass(frozen=True)
class Passage:
    """One member's part of a round of a group: requests, and bytes up and down."""

    writes: float
    reads: float
    up: float
    down: float
    hops: int

    def seconds(self, rate: float, latency: float) -> float:
        """Up, then down, at so many bytes a second each way and so many seconds a request."""
        return (self.up + self.down) / rate + self.hops * IN_TURN * latency


def passage(members: int, parts: Sequence[float], size: float) -> Passage:
    """What a member does, of a message of `size` bytes; `parts` are the shares of it that go to each other, by hop."""
    packets = passes(members, parts, size)
    others = members - 1
    bundled = circles(tuple(range(members))) if len(packets) == 1 and size <= SMALL else []
    if bundled:
        reads, writes = len(bundled) + 1.0, len(bundled) / members  # a bundle of each, and a packet by its bearer
    else:
        reads, writes = float(others * len(packets)), len(packets) - 1.0
    return Passage(
        writes=WRITES + LISTINGS * len(packets) + writes,
        reads=reads,
        up=sum(nbytes * others / readers for nbytes, readers in packets),
        down=others * sum(nbytes for nbytes, _ in packets),
        hops=len(packets),
    )
