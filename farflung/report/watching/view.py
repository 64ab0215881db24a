"""What the page shows now, and what is new since it asked last."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs_version

from farflung.report import figures
from farflung.report.facts import Axis
from farflung.report.figures import Trace
from farflung.report.islands import wide_table
from farflung.report.page import page, picture
from farflung.report.watching.watched import Shown, Watched

REFRESH_SECONDS = 1.0
"""However many browsers ask, folders are looked at no more often."""
PLOTLY = f"/plotly-{get_plotlyjs_version()}.min.js"
TITLES = {"bytes": "Loss against bytes", "seconds": "Loss against time"}

News = dict[str, Any]
_Picture = tuple[str, Callable[[], list[Trace]], Callable[[], go.Figure]]


class View:
    """All runs on one page. Its methods may be called by any thread."""

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = watched
        self._lock = threading.Lock()
        self._looked = -REFRESH_SECONDS
        self._token = secrets.token_hex(4)
        self._sections: dict[str, tuple[int, str]] = {}
        """Each with the number of the look at which it became what it is."""
        self._look = 0

    def refresh(self) -> None:
        """Looks at all runs, unless that was done just now."""
        with self._lock:
            self._refresh()

    def shell(self) -> str:
        """A page that is there at once, and asks for all that is on it."""
        return self._around(["<section>The run is being read …</section>"], "", 0)

    def page(self) -> str:
        """The page as it is now, which asks for news from then on."""
        with self._lock:
            self._refresh()
            drawn = [(title, picture(figure())) for title, _, figure in self._pictures()]
            pictures = [f"<section><h2>{title}</h2>{inside}</section>" for title, inside in drawn]
            told = [f'<section id="{name}"{_kind(name)}>{html}</section>' for name, (_, html) in self._sections.items()]
            sections = [f'<div class="grid">{"".join(part)}</div>' for part in (told[:2], [*pictures, *told[2:]])]
            return self._around(sections, self._epoch(), self._look)

    def _around(self, sections: Sequence[str], epoch: str, look: int) -> str:
        names = " and ".join(run.name for run in self._watched[:2])
        more = f" and {len(self._watched) - 2} more" if len(self._watched) > 2 else ""
        program = f'<script src="{PLOTLY}" id="plotly" defer></script>'
        return page(f"farflung: {names}{more}", sections, program, {"epoch": epoch, "since": look})

    def news(self, epoch: str, since: int, have: Sequence[Sequence[int]]) -> News:
        """What is new since a look: sections, and points of lines of which the page `have` so many.

        Where the `epoch` is another than the page's, it is to be made anew.
        """
        with self._lock:
            self._refresh()
            told: News = {"epoch": self._epoch(), "since": self._look}
            if told["epoch"] != epoch:
                return told
            told["sections"] = {name: html for name, (look, html) in self._sections.items() if look > since}
            lines = {
                number: {
                    place: points
                    for place, (trace, begin) in enumerate(zip(traces(), begins, strict=True))
                    if (points := trace.points(begin))[0]
                }
                for number, ((_, traces, _), begins) in enumerate(zip(self._pictures(), have, strict=True))
            }
            told["points"] = {number: traces for number, traces in lines.items() if traces}
            return told

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        for run in self._watched:
            run.refresh()
        self._look += 1
        for name, html in _sections(self._watched).items():
            if self._sections.get(name, (0, None))[1] != html:
                self._sections[name] = self._look, html
        self._looked = time.monotonic()

    def _pictures(self) -> list[_Picture]:
        """The pictures' titles, lines, and how they are drawn."""

        def loss(axis: Axis) -> _Picture:
            title = TITLES.get(axis, f"Loss against {figures.units_of(runs)}")
            return title, lambda: figures.loss_traces(runs, axis), lambda: figures.loss_figure(runs, axis)

        def score(axis: Axis) -> _Picture:
            against = TITLES.get(axis, f"Loss against {figures.units_of(runs)}").removeprefix("Loss ")
            title = escape(figures.score_title(runs, against))
            return title, lambda: figures.score_traces(runs, axis), lambda: figures.score_figure(runs, axis)

        runs = self._watched
        axes = [axis for axis in ("tokens", "bytes", "seconds") if any(axis in run.axes for run in runs)]
        spread = "Consensus distance", lambda: figures.consensus_traces(runs), lambda: figures.consensus_figure(runs)
        scored = axes if any(not run.judged_by_loss for run in runs) else []
        return [*map(loss, axes), *map(score, scored), *([spread] if "tokens" in axes else [])]  # type: ignore[arg-type]

    def _epoch(self) -> str:
        """Another one when lines come, go or lose points, or are drawn otherwise, as one point is."""
        traces = [trace for _, of_picture, _ in self._pictures() for trace in of_picture()]
        lines = [(trace.name, min(2, len(trace.points()[0]))) for trace in traces]
        told = (self._token, [run.generation for run in self._watched], lines)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def _kind(name: str) -> str:
    """How a section looks: the first of a run is a wide table."""
    return ' class="warnings"' if name == "warnings" else ' class="across"' if name.endswith("-0") else ""


def _sections(watched: Sequence[Watched]) -> dict[str, str]:
    """All sections but those of pictures, by their ids; the first two go before the pictures."""
    every = [run.shown() for run in watched]
    sections = {"now": _now(watched, every), "warnings": _warnings(watched, every)}
    for number, (run, shown) in enumerate(zip(watched, every, strict=True)):
        for place, (title, html) in enumerate(shown.sections.items()):
            whose = f": {escape(run.name)}" if len(watched) > 1 else ""
            sections[f"run-{number}-{place}"] = f"<h2>{title}{whose}</h2>{html}" if html else ""
    return sections


def _now(watched: Sequence[Watched], every: Sequence[Shown]) -> str:
    labels = list(dict.fromkeys(label for shown in every for label in shown.facts))
    heads = [
        f'<span class="run" style="background:{colour}"></span>{escape(run.name)}'
        for colour, run in zip(figures.colours_of(watched), watched, strict=True)
    ]
    return wide_table(["", *heads], [[label, *(shown.facts.get(label, "") for shown in every)] for label in labels])


def _warnings(watched: Sequence[Watched], every: Sequence[Shown]) -> str:
    whose = [f"{escape(run.name)}: " if len(watched) > 1 else "" for run in watched]
    lines = [f"<li>{name}{line}</li>" for name, shown in zip(whose, every, strict=True) for line in shown.warnings]
    return f"<h2>Warnings</h2><ul>{''.join(lines)}</ul>" if lines else ""
