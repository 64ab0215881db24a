"""What each process of an island did."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from farflung.durations import duration
from farflung.events import Event, RoundEvent, StartEvent, StepEvent
from farflung.report.numbers import nbytes
from farflung.report.read import Run

HEADINGS = ("process", "parameters", "peak memory", "rounds", "sent in rounds", "waited for rounds")


def islands_table(run: Run) -> str:
    """A row for each process, as HTML."""
    processes = [((replica, 0), events) for replica, events in run.events.items()] + list(run.parts.items())
    rows = [[escape(cell) for cell in _row(events)] for _, events in sorted(processes) if events]
    return f"<p>{nbytes(run.boundary_bytes)} went from stage to stage, in all replicas.</p>{wide_table(HEADINGS, rows)}"


def wide_table(heads: Sequence[str], rows: Sequence[Sequence[str]], high: bool = False) -> str:
    """A table whose cells are HTML, which scrolls on narrow screens; a `high` one scrolls up and down, too."""
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide{" high" if high else ""}"><table><tr>{head}</tr>{body}</table></div>'


def _row(events: list[Event]) -> tuple[str, ...]:
    start = next(event for event in events if isinstance(event, StartEvent))
    rounds = [event for event in events if isinstance(event, RoundEvent)]
    memory = [event.peak_memory for event in events if isinstance(event, StepEvent) and event.peak_memory]
    waited = sum(max(0.0, event.landed - event.waited_from) for event in rounds)
    shard = f", shard {start.shard}" if start.shards > 1 else ""
    return (
        f"replica {start.replica}, stage {start.stage}{shard}",
        f"{start.own_parameters:,}",
        nbytes(memory[-1]) if memory else "…",
        str(len(rounds)),
        nbytes(sum(event.bytes_sent for event in rounds)),
        duration(waited),
    )
