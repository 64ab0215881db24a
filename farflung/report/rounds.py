"""The latest rounds as pictures: who met whom, with bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from farflung.errors import counted
from farflung.events import RoundEvent
from farflung.report.numbers import nbytes

SHOWN = 6
"""The latest rounds that are kept."""
MOST_NUMBERED = 16
"""The most replicas whose numbers stand beside them."""
RADIUS, MIDDLE = 78.0, 100.0

Point = tuple[float, float]


@dataclass
class Rounds:
    """The latest rounds, by number and fragment: of each, what every replica has told."""

    told: dict[tuple[int, int], dict[int, RoundEvent]] = field(default_factory=dict)

    def add(self, event: RoundEvent) -> None:
        """A round has ended for a replica; of the same number, it has the latest."""
        self.told.setdefault((event.round, event.fragment), {})[event.replica] = event
        if len(self.told) > SHOWN:
            del self.told[min(self.told)]

    def html(self, replicas: Sequence[int], ranks: Mapping[int, int]) -> str:
        """A picture for each round, the latest first; `ranks` has replicas by their numbers in groups."""
        if not self.told:
            return ""
        met = {ranks.get(rank, rank) for told in self.told.values() for event in told.values() for rank in event.group}
        places = _circle(sorted({*replicas, *met}))
        latest = sorted(self.told.items(), reverse=True)
        pictures = [_picture(number, list(told.values()), places, ranks) for (number, _), told in latest]
        return f'<div class="rounds">{"".join(pictures)}</div>'


def _circle(members: Sequence[int]) -> dict[int, Point]:
    turns = [2 * math.pi * number / len(members) for number in range(len(members))]
    circle = [(MIDDLE + RADIUS * math.sin(turn), MIDDLE - RADIUS * math.cos(turn)) for turn in turns]
    return dict(zip(members, circle, strict=True))


def _picture(number: int, told: list[RoundEvent], places: Mapping[int, Point], ranks: Mapping[int, int]) -> str:
    groups: dict[frozenset[int], list[RoundEvent]] = {}
    for event in told:
        groups.setdefault(frozenset(ranks.get(rank, rank) for rank in event.group), []).append(event)
    lines = [_lines(group, events, places) for group, events in groups.items() if len(group) > 1]
    outcomes = {event.replica: event.outcome for event in told}
    outcomes |= {rank: "averaged" for group in groups if len(group) > 1 for rank in group if rank not in outcomes}
    marks = [_mark(replica, place, outcomes.get(replica, "sat out"), len(places)) for replica, place in places.items()]
    drawing = f'<svg viewBox="0 0 200 200" role="img">{"".join(lines)}{"".join(marks)}</svg>'
    return f"<figure>{drawing}<figcaption>{escape(_caption(number, told, groups))}</figcaption></figure>"


def _lines(group: frozenset[int], events: Sequence[RoundEvent], places: Mapping[int, Point]) -> str:
    """A line from each member to their middle; two have one line between them."""
    ends = [places[member] for member in sorted(group)]
    middle = (sum(x for x, _ in ends) / len(ends), sum(y for _, y in ends) / len(ends))
    who = ", ".join(map(str, sorted(group)))
    title = f"<title>{escape(f'{who}: {_bytes(events)}, {_seconds(events)}')}</title>"
    strokes = [
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{middle[0]:.1f}" y2="{middle[1]:.1f}">{title}</line>' for x, y in ends
    ]
    return "".join(strokes)


def _mark(replica: int, place: Point, outcome: str, count: int) -> str:
    kind = {"averaged": "", "sat out": ' class="out"'}.get(outcome, ' class="lost"')
    size = max(2.5, min(6.0, 120 / count))
    title = f"<title>{escape(f'{replica}: {outcome}')}</title>"
    mark = f'<circle{kind} cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="{size:.1f}">{title}</circle>'
    if count > MOST_NUMBERED or replica > 999:  # a peer on the internet has a long number
        return mark
    beside = [MIDDLE + (coordinate - MIDDLE) * 1.18 for coordinate in place]
    return f'{mark}<text x="{beside[0]:.1f}" y="{beside[1]:.1f}">{replica}</text>'


def _caption(number: int, told: Sequence[RoundEvent], groups: Mapping[frozenset[int], object]) -> str:
    together = sum(len(group) > 1 for group in groups)
    kind = "pair" if all(len(group) <= 2 for group in groups) else "group"
    parts = [f"round {number}, after step {max(event.started_step for event in told)}: {counted(together, kind)}"]
    parts += [_bytes(told), _seconds(told)]
    lost = sum(event.outcome not in ("averaged", "sat out") for event in told)
    return ", ".join([*parts, *([f"{lost} not averaged"] if lost else [])])


def _bytes(events: Sequence[RoundEvent]) -> str:
    return f"{nbytes(sum(event.bytes_sent for event in events) / len(events))} each"


def _seconds(events: Sequence[RoundEvent]) -> str:
    return f"{max(event.finished - event.started for event in events):.2f} s"
