"""One replica's figures on their way to one tracker, in a thread: a tracker that hangs holds up no other."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from farflung.files import beside
from farflung.report.trackers.known import Seat, Tracker
from farflung.report.trackers.rows import Cursor, Row

MOST_AT_ONCE = 500
"""Rows after which it is written down how far the tracker was given them."""


class Feed(threading.Thread):
    """Gives rows to a tracker, and keeps in a file how far it came: what goes on later begins there."""

    def __init__(self, tracker: Tracker, seat: Seat, state: Path) -> None:
        super().__init__(daemon=True)
        known = _known(state)
        self.given = {kind: tuple(place) for kind, place in known.get("given", {}).items()}
        self.cursor = Cursor(dict(self.given))
        self.fault = ""
        """Why the tracker gets no more, in a line."""
        self.where = ""
        """Where the figures are, once the tracker has all of them."""
        self._rows = known.get("rows", 0)
        self._tracker, self._state = tracker, state
        self._seat = Seat(**{**vars(seat), "before": known.get("run", "")})
        self._waiting: SimpleQueue[Row | None] = SimpleQueue()

    def give(self, row: Row) -> None:
        """Has a row waiting."""
        self._waiting.put(row)

    def end(self) -> None:
        """There are no more rows."""
        self._waiting.put(None)

    def run(self) -> None:
        """The thread: until the end of rows, or a fault of the tracker."""
        try:
            opened = self._tracker.begin(self._seat)
            self._save(opened.tracker)
            for rows in self._batches():
                for row in rows:
                    self._log(opened, row)
                self._save(opened.tracker)
            opened.finish()
            self.where = self._tracker.where(self._seat, opened.tracker)
        except BaseException as error:  # whatever goes wrong in somebody else's library
            self.fault = " ".join(f"{type(error).__name__}: {error}".split())

    def _batches(self) -> Iterator[list[Row]]:
        """What waits, once something does, until the end."""
        row: Row | None = None
        while True:
            rows = [row := self._waiting.get()]
            with contextlib.suppress(Empty):
                while row is not None and len(rows) < MOST_AT_ONCE:
                    rows.append(row := self._waiting.get_nowait())
            yield [one for one in rows if one is not None]
            if row is None:
                return

    def _log(self, opened: Any, row: Row) -> None:
        self._rows += 1
        if self._tracker.ordered:
            opened.log({**row.values, "step": row.step}, step=self._rows)
        else:
            opened.log(row.values, step=row.step)
        self.given[row.kind] = row.place

    def _save(self, run: Any) -> None:
        told = {"run": self._tracker.called(run), "rows": self._rows, "given": self.given}
        new = beside(self._state)  # not forced onto the disk, which training may be waiting for
        new.write_text(json.dumps(told), "utf-8")
        new.replace(self._state)


def _known(state: Path) -> dict[str, Any]:
    """How far a tracker came before."""
    with contextlib.suppress(OSError, ValueError):  # there is none yet, or a power cut has emptied it
        told = json.loads(state.read_text("utf-8"))
        return told if isinstance(told, dict) else {}
    return {}
