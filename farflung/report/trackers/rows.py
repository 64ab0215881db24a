"""What trackers are given of a run: a row of figures for each event, once, also where a run went back."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from farflung.events import EvaluationEvent, Event, RoundEvent, StartEvent
from farflung.figure import LOSS, Figure
from farflung.report.read import Run

NO_FIGURES = ("replica", "step")
"""Fields that say whose row it is and where it stands."""
UNUSUAL = re.compile(r"[^\w.-]+")
"""Letters of a path that some tracker refuses."""
DISTANCE = "consensus"
"""The kind of row that tells of the consensus distance."""

Place = tuple[int, int]
"""A step, and how many rows of one kind there were of that step."""


@dataclass(frozen=True)
class Row:
    """Figures of one step, by the names KIND/FIELD."""

    kind: str
    step: int
    values: dict[str, float]
    place: Place


def figures_of(event: Event, judged_by: Figure = LOSS) -> dict[str, float]:
    """An event's finite numbers, under the names of its fields; of a round, how long it took, too.

    What a model is judged by has the name of that figure.

    Those of a field that is a table have the names KIND/FIELD/NAME, in the letters that all trackers take.
    """
    values: dict[str, Any] = {one.name: getattr(event, one.name) for one in dataclasses.fields(event)}
    if isinstance(event, EvaluationEvent):
        values |= {judged_by.key: values.pop("score"), judged_by.key_of_sources: values.pop("scores")}
    for field_name, table in [(name, value) for name, value in values.items() if isinstance(value, dict)]:
        values |= {f"{field_name}/{UNUSUAL.sub('_', name).strip('_.')}": value for name, value in table.items()}
    if isinstance(event, RoundEvent):
        values["seconds"] = event.finished - event.started
    return {
        f"{event.kind}/{name}": value
        for name, value in values.items()
        if type(value) in (int, float) and math.isfinite(value) and name not in NO_FIGURES
    }


@dataclass
class Cursor:
    """How far the events of one replica have been made into rows.

    Args:
        reached: of each kind, the place of the last row that a tracker was given.
    """

    reached: dict[str, Place] = field(default_factory=dict)
    _position: int = 0
    _last: Event | None = None
    _seen: dict[str, Place] = field(default_factory=dict)
    _judged_by: Figure = LOSS

    def new(self, events: list[Event]) -> Iterator[Row]:
        """The rows of events that a tracker was not given yet."""
        if self._position > len(events) or (self._position and events[self._position - 1] is not self._last):
            self._position, self._seen = 0, {}  # the run went back to a checkpoint
        for event in events[self._position :]:
            if isinstance(event, StartEvent):
                self._judged_by = event.figure
            if row := self._row(event.kind, event.step, figures_of(event, self._judged_by)):
                yield row
        self._position, self._last = len(events), events[-1] if events else None

    def distances(self, run: Run) -> Iterator[Row]:
        """The rows of consensus distances that a tracker was not given yet."""
        self._seen.pop(DISTANCE, None)
        for step, distance in run.consensus_distance().items():
            if row := self._row(DISTANCE, step, {f"{DISTANCE}/distance": distance}):
                yield row

    def _row(self, kind: str, step: int, values: dict[str, float]) -> Row | None:
        before, count = self._seen.get(kind, (-1, 0))
        place = (step, count + 1 if step == before else 1)
        self._seen[kind] = place
        if not values or place <= self.reached.get(kind, (-1, 0)):
            return None
        self.reached[kind] = place
        return Row(kind, step, values, place)
