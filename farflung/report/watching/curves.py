"""What is kept of a run's events for its lines: their points, and not the events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, get_args

from farflung.report.facts import Axis, Line
from farflung.report.read import P

MOST_POINTS = 1000
"""Of a line; then every second one goes."""
MOST_WAITING = 2000
"""Steps that wait for events of some replica."""


class Curve:
    """The points of a line, on every axis; of a long run, evenly fewer."""

    def __init__(self) -> None:
        self.thinned = 0
        """How often every second point was left out."""
        self._xs: dict[Axis, list[float]] = {axis: [] for axis in get_args(Axis)}
        self._ys: list[float | None] = []
        self._offered = 0

    def add(self, place: Mapping[Axis, float], y: float | None) -> None:
        """One more point."""
        self._offered += 1
        if (self._offered - 1) % (1 << self.thinned):
            return
        for axis, xs in self._xs.items():
            xs.append(place[axis])
        self._ys.append(y)
        if len(self._ys) > MOST_POINTS:
            self.thinned += 1
            self._xs = {axis: xs[::2] for axis, xs in self._xs.items()}
            self._ys = self._ys[::2]

    def line(self, axis: Axis) -> Line:
        """The points against an axis."""
        return self._xs[axis], self._ys

    @property
    def last(self) -> float | None:
        """The last point's y."""
        return self._ys[-1] if self._ys else None


class Together(Generic[P]):
    """The replicas' events of one kind, until every replica has one of the same step."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[int, P]] = {}
        self._latest: dict[int, P] = {}
        self._done = -1

    def add(self, event: P) -> None:
        """An event of a replica, whose steps go up."""
        self._latest[event.replica] = event
        if event.step > self._done:
            self._waiting.setdefault(event.step, {})[event.replica] = event

    def complete(
        self, replicas: Sequence[int], gone: Mapping[int, int]
    ) -> Iterator[tuple[int, Sequence[P], Sequence[P]]]:
        """The steps that all replicas have come to: their events, and these with the last ones of those `gone` before.

        `gone` says after which step a replica has written no more.
        """
        for step in sorted(self._waiting):
            expected = [replica for replica in replicas if step <= gone.get(replica, step)]
            seen = self._waiting[step]
            if expected and all(replica in seen for replica in expected):
                events = [seen[replica] for replica in expected]
                before = [last for replica, last in self._latest.items() if replica not in expected]
                self._done = step
                yield step, events, [*events, *before]
        # Who is past a step writes nothing of it any more; where peers are at steps of their own, none is complete.
        kept = sorted(step for step in self._waiting if step > self._done)[-MOST_WAITING:]
        self._waiting = {step: self._waiting[step] for step in kept}
