"""Hands a run's figures on to trackers, by a process of its own: what becomes of a tracker costs training nothing."""

from farflung.report.trackers.follow import Replicas, follow, leave
from farflung.report.trackers.known import TRACKERS, named
from farflung.report.trackers.start import UNTIL_CLOSED, tracked

__all__ = ["TRACKERS", "UNTIL_CLOSED", "Replicas", "follow", "leave", "named", "tracked"]
