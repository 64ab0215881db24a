"""Virtual time: planned actions, in order of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Runs actions at their moments, one after the other; those of the same moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._asked = 0
        self._tidy_at = 1024

    def at(self, moment: float, action: Callable[[], None]) -> Event:
        """Asks for an action at a moment that has not passed, in seconds."""
        if moment < self.now:
            raise ValueError(f"{moment} s has passed: it is {self.now} s")
        event = Event(action)
        heapq.heappush(self._events, (moment, self._asked, event))
        self._asked += 1
        if len(self._events) > self._tidy_at:
            # Deadlines are cancelled nearly always; without this they would be most of the heap.
            self._events = [entry for entry in self._events if entry[2].action is not None]
            heapq.heapify(self._events)
            self._tidy_at = max(1024, 2 * len(self._events))
        return event

    def advance(self) -> bool:
        """Advances to the next moment and runs its first action; False when nothing is planned."""
        while self._events:
            moment, _, event = heapq.heappop(self._events)
            action, event.action = event.action, None
            if action is not None:
                self.now = moment
                action()
                return True
        return False

    def due(self) -> bool:
        """Whether something is planned for this very moment."""
        while self._events and self._events[0][2].action is None:
            heapq.heappop(self._events)
        return bool(self._events) and self._events[0][0] <= self.now


class Event:
    """A planned action, which can be cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Takes it back; harmless when it has happened."""
        self.action = None
