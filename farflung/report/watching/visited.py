"""The peers that a ticket leads to, as `farflung status` shows them; their losses are drawn while they are watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from farflung.errors import counted
from farflung.events import StartEvent
from farflung.report import peers
from farflung.report.facts import Axis, Line, What
from farflung.report.islands import wide_table
from farflung.report.numbers import number
from farflung.report.read import mean
from farflung.report.watching.cards import HIGH
from farflung.report.watching.curves import Curve
from farflung.report.watching.watched import Shown, Watched

SILENT_S = 60.0
"""A peer that was not heard for so long is warned of; each tells the others of itself every few seconds."""


class Visited(Watched):
    """A run on the internet, of which this machine sees what its peers tell. `source` has a row for each peer."""

    def __init__(self, name: str, settings: Mapping[str, Any], source: Callable[[], list[peers.Row]]) -> None:
        super().__init__(Path(name), {"network": "internet", **settings}, axes=("seconds",))
        self._source = source
        self._rows: list[peers.Row] = []
        self._losses = Curve()
        self._began = time.monotonic()

    @property
    def name(self) -> str:
        """The run's."""
        return str(self.folder)

    @property
    def replicas(self) -> list[int]:
        """See Facts; peers have no numbers here."""
        return []

    @property
    def starts(self) -> Sequence[StartEvent]:
        """See Facts."""
        return []

    @property
    def generation(self) -> tuple[int, ...]:
        """See Watched."""
        return (self._losses.thinned,)

    def line(self, what: What, axis: Axis) -> Line:
        """See Facts."""
        return self._losses.line(axis) if what == "training" else ([], [])

    def refresh(self) -> None:
        """See Watched."""
        self._rows = peers.ordered(self._source())
        trains = [row for row in self._rows if row["state"] == peers.TRAINS]
        losses = [row["loss"] for row in trains if "loss" in row]
        seconds = time.monotonic() - self._began
        if losses and (loss := mean(losses)) is not None:
            step = max(row["step"] for row in trains)
            self._losses.add({"seconds": seconds, "steps": step, "tokens": 0.0, "bytes": 0.0}, loss)

    def shown(self) -> Shown:
        """See Watched."""
        headings, cells = peers.cells_of(self._rows)
        rows = [[escape(cell) for cell in row] for row in cells]
        trains = [row for row in self._rows if row["state"] == peers.TRAINS]
        speed = sum(row.get("tokens_per_second", 0.0) for row in trains)
        return Shown(
            facts={
                "method": escape(str(self.settings.get("method", "…"))),
                "state": f"{counted(len(trains), 'peer')} in training",
                "step": str(max((row["step"] for row in trains), default="…")),
                "training loss": number(self._losses.last) if self._losses.last is not None else "…",
                "tokens": f"{speed:,.0f} a second now",
            },
            warnings=[f"<b>{escape(row['name'])}</b> {line}" for row in self._rows if (line := _fault(row))],
            sections={"Peers": wide_table(headings, rows, high=len(rows) > HIGH) if rows else "<p>No peer yet.</p>"},
        )


def _fault(row: peers.Row) -> str:
    """What is wrong with a peer."""
    if row["state"] == peers.GONE:
        return f"is gone, since step {row['step']}"
    if row["state"] == peers.TRAINS and "loss" in row and row["loss"] is None:
        return f"has a training loss that is not finite, at step {row['step']}"
    return f"was not heard for {row['heard']:.0f} s" if row["heard"] > SILENT_S else ""
