"""How the replicas fit into their memory."""

from __future__ import annotations

from html import escape

from farflung.durations import duration
from farflung.events import MemoryEvent
from farflung.report.islands import wide_table
from farflung.report.numbers import nbytes
from farflung.report.read import Run

HEADINGS = ("replica", "plan", "may take", "memory predicted", "measured", "step predicted", "measured")


def memory_line(event: MemoryEvent) -> str:
    """A plan, and what it takes, in a line."""
    measured = "" if event.measured_bytes is None else f" (measured: {nbytes(event.measured_bytes)})"
    seconds = "" if event.measured_seconds is None else f" (measured: {duration(event.measured_seconds)})"
    return (
        f"memory: {event.plan}; {nbytes(event.predicted_bytes)} of {nbytes(event.cap)}{measured}, "
        f"{duration(event.predicted_seconds)} a step{seconds}"
    )


def latest(run: Run) -> list[MemoryEvent]:
    """What each replica has told of its memory last."""
    return [event for replica in run.replicas for event in run.of(replica, MemoryEvent)[-1:]]


def memory_table(run: Run) -> str:
    """A row for each replica, as HTML."""
    return wide_table(HEADINGS, [[escape(cell) for cell in _row(event)] for event in latest(run)])


def _row(event: MemoryEvent) -> tuple[str, ...]:
    return (
        str(event.replica),
        event.plan,
        nbytes(event.cap),
        nbytes(event.predicted_bytes),
        "…" if event.measured_bytes is None else nbytes(event.measured_bytes),
        duration(event.predicted_seconds),
        "…" if event.measured_seconds is None else duration(event.measured_seconds),
    )
