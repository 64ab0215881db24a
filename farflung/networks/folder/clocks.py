"""Whether this machine's clock is the other peers', by what these write between two listings."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from statistics import median_high, median_low

from farflung.networks.folder.notes import Listing
from farflung.networks.folder.sealing import Kind
from farflung.networks.peers.admission import clock_fault

LATE_SECONDS = 60.0
"""How long others may take to see what one has begun to write: requests fail, and disks keep listings for a while."""
SMALL = (Kind.BEAT, Kind.HERE)
"""Objects that are written at once when their notes are made."""


class Clocks:
    """Compares a peer's clock to the others'. One of these that lies, or stood still, decides nothing."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._looked = float("-inf")
        self._ahead: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=2))
        """Seconds by which this peer's clock is ahead of each other's at least, in the last two listings with news."""

    def fault(self, listing: Listing) -> str:
        """What to say to this peer's user after one more listing; "" where its clock is like most others'."""
        asked = time.time() - (time.monotonic() - listing.at)
        news: dict[int, float] = {}
        for one in listing.written:
            if one.seen > self._looked and one.note.kind in SMALL and one.note.rank != self._own:
                ago = asked - one.note.time
                ahead = min(ago, 0.0) or max(0.0, ago - (listing.at - self._looked))
                news[one.note.rank] = min(news.get(one.note.rank, ahead), ahead, key=abs)
        self._looked = listing.at
        for rank, ahead in news.items():
            self._ahead[rank].append(ahead)
        known = [min(both, key=abs) for both in self._ahead.values() if len(both) > 1]
        return clock_fault(min(median_low(known), median_high(known), key=abs), LATE_SECONDS) if known else ""
