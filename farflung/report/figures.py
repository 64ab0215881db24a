"""The pictures of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from farflung.events import RoundEvent
from farflung.report.comparison import bits_per_byte, unlike_tokens
from farflung.report.facts import Axis, Facts, Line, What
from farflung.report.read import Run

COLOURS = ("#1f6feb", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#5c6770", "#b5651d", "#3a3a8c")
"""One colour a run, the same in every picture."""

WORK, EXCHANGE, WAITING = "#9ecae1", "#f2b366", "#c0392b"
ROUNDS_SHOWN = 200
"""The most rounds of a replica that a timeline shows: its last ones."""

AXES = {"bytes": "megabytes sent, all replicas together", "seconds": "seconds"}
MOST_DOTTED = 16
"""The most replicas that have lines of their own; of more, nobody could tell them apart."""


def units_of(runs: Sequence[Facts]) -> str:
    """The units of these runs' samples, such as tokens."""
    return " or ".join(dict.fromkeys(run.units for run in runs))


@dataclass(frozen=True)
class Trace:
    """One line of a picture: of which run, and how it is drawn."""

    run: Facts
    what: What
    axis: Axis
    name: str
    colour: str
    how: Mapping[str, Any]
    bits: bool = False
    """Whether the y are nats a token, and are to be bits a byte."""

    def points(self, begin: int = 0) -> Line:
        """The line's points, from one on."""
        xs, ys = self.run.line(self.what, self.axis)
        return xs[begin:], [bits_per_byte(self.run, y) if self.bits else y for y in ys[begin:]]


def loss_traces(runs: Sequence[Facts], axis: Axis) -> list[Trace]:
    """The replicas' mean losses against `axis` (tokens, bytes or seconds): validation, and lighter, training."""
    bits, traces = _in_bits(runs), []
    for colour, run in zip(colours_of(runs), runs, strict=True):
        lighter = {"width": 1.5, "mode": "lines", "opacity": 0.6}
        traces.append(Trace(run, "training", axis, f"{run.name}, training", colour, lighter, bits))
        if run.judged_by_loss:
            traces.append(Trace(run, "score", axis, f"{run.name}, {run.figure.heading}", colour, {}, bits))
            traces += _of_each_replica(runs, run, axis, bits)
    return traces


def score_traces(runs: Sequence[Facts], axis: Axis) -> list[Trace]:
    """What the replicas are judged by, on average, where it is no loss as in training."""
    traces = []
    for colour, run in zip(colours_of(runs), runs, strict=True):
        if not run.judged_by_loss:
            traces.append(Trace(run, "score", axis, f"{run.name}, {run.figure.name}", colour, {}))
            traces += _of_each_replica(runs, run, axis)
    return traces


def _of_each_replica(runs: Sequence[Facts], run: Facts, axis: Axis, bits: bool = False) -> list[Trace]:
    """What each replica of a single run is judged by.

    Above their mean and in other colours: where they are all alike, one line would hide the others.
    """
    if len(runs) > 1 or not 1 < len(run.replicas) <= MOST_DOTTED:
        return []
    dotted = {"width": 1.5, "dash": "dot", "mode": "lines"}
    colours = [COLOURS[1:][place % (len(COLOURS) - 1)] for place in range(len(run.replicas))]
    return [
        Trace(run, replica, axis, run.called(replica), colour, dotted, bits)
        for replica, colour in zip(run.replicas, colours, strict=True)
    ]


def loss_figure(runs: Sequence[Facts], axis: Axis) -> go.Figure:
    """What `loss_traces` are."""
    measures = "bits a byte" if _in_bits(runs) else " or ".join(dict.fromkeys(run.measure for run in runs))
    return _drawn(_figure(_title(runs, axis), f"loss, {measures}"), loss_traces(runs, axis))


def score_figure(runs: Sequence[Facts], axis: Axis) -> go.Figure:
    """What `score_traces` are."""
    return _drawn(_figure(_title(runs, axis), scores_of(runs)), score_traces(runs, axis))


def scores_of(runs: Sequence[Facts]) -> str:
    """The names of what runs are judged by that is no loss as in training, with their units."""
    told = [run.figure for run in runs if not run.judged_by_loss]
    return " or ".join(dict.fromkeys(", ".join(filter(None, (one.name, one.unit))) for one in told))


def score_title(runs: Sequence[Facts], against: str) -> str:
    """The heading over a picture of what runs are judged by."""
    name = scores_of(runs)
    return f"{name[:1].upper()}{name[1:]} {against}"


def _title(runs: Sequence[Facts], axis: Axis) -> str:
    return AXES.get(axis, f"{units_of(runs)}, all replicas together")


def _in_bits(runs: Sequence[Facts]) -> bool:
    return unlike_tokens(runs) and all(run.bytes_per_unit for run in runs)


def consensus_traces(runs: Sequence[Facts]) -> list[Trace]:
    """The consensus distance of the replicas, against steps."""
    colours = zip(colours_of(runs), runs, strict=True)
    return [Trace(run, "distance", "steps", run.name, colour, {}) for colour, run in colours]


def consensus_figure(runs: Sequence[Facts]) -> go.Figure:
    """What `consensus_traces` are."""
    return _drawn(_figure(_counted(runs), "rms of sampled weights"), consensus_traces(runs))


def _counted(runs: Sequence[Facts]) -> str:
    """What runs count: inner steps, or by the clock, tenths of a second."""
    return " or ".join(dict.fromkeys("tenths of a second" if run.by_clock else "inner steps" for run in runs))


def _drawn(figure: go.Figure, traces: Sequence[Trace]) -> go.Figure:
    for trace in traces:
        _draw(figure, trace.points(), trace.name, trace.colour, **trace.how)
    return figure


def compression_figure(runs: list[Run]) -> go.Figure:
    """The share of messages that packets left out, against steps; the mean of the replicas."""
    figure = _figure(_counted(runs), "left out, share of the norm")
    for colour, run in zip(colours_of(runs), runs, strict=True):
        _draw(figure, _by_started_step(run, lambda event: event.compression_error), run.name, colour)
    figure.update_yaxes(rangemode="tozero")
    return figure


def adaptation_figure(run: Run) -> go.Figure:
    """An adapting run's effective rank, steps between rounds, and bytes of a round."""
    figure = _figure(_counted([run]), "in per cent of the first round's")
    values: dict[str, Callable[[RoundEvent], float | None]] = {
        "effective rank": lambda event: event.effective_rank,
        "steps between rounds": lambda event: event.every,
        "bytes of a round": lambda event: event.bytes_sent,
    }
    for colour, (name, value) in zip(COLOURS, values.items(), strict=False):
        x, y = _by_started_step(run, value)
        shares = [100 * height / y[0] for height in y] if y and y[0] else y
        words: dict[str, Any] = {
            "text": [f"{height:,.4g}" for height in y],
            "hovertemplate": "%{text}<extra>" + name + "</extra>",
        }
        _draw(figure, (x, shares), name, colour, **words)
    figure.update_yaxes(rangemode="tozero")
    return figure


def adapts(run: Run) -> bool:
    """Whether the run adapts to effective ranks."""
    return any(event.effective_rank is not None for event in run.all_of(RoundEvent))


def compresses(run: Run) -> bool:
    """Whether any packet of the run left something out."""
    return any(event.compression_error for event in run.all_of(RoundEvent))


def _by_started_step(run: Run, value: Callable[[RoundEvent], float | None]) -> tuple[list[int], list[float]]:
    """The replicas' mean of one value of their rounds, by the step at which these started."""
    seen: dict[int, list[float]] = {}
    for event in run.all_of(RoundEvent):
        if (height := value(event)) is not None and event.group:
            seen.setdefault(event.started_step, []).append(height)
    return sorted(seen), [sum(seen[step]) / len(seen[step]) for step in sorted(seen)]


def timeline_figure(run: Run) -> go.Figure:
    """When each replica computed, exchanged (in a row below), and waited for an exchange."""
    figure = _figure("seconds", "")
    bars: dict[str, list[tuple[float, float, str]]] = {"compute": [], "exchange": [], "waiting": []}
    for replica in run.replicas:
        who = run.called(replica)
        all_rounds = run.of(replica, RoundEvent)
        rounds = all_rounds[-ROUNDS_SHOWN:]
        busy_from = all_rounds[-ROUNDS_SHOWN - 1].landed if len(all_rounds) > ROUNDS_SHOWN else 0.0
        for round in rounds:
            bars["compute"].append((busy_from, round.waited_from, who))
            bars["waiting"].append((round.waited_from, round.landed, who))
            bars["exchange"].append((round.started, round.finished, f"{who}, link"))
            busy_from = round.landed
        last = run.events[replica][-1].at
        bars["compute"].append((busy_from, max(last, busy_from), who))
    for (kind, pieces), colour in zip(bars.items(), (WORK, EXCHANGE, WAITING), strict=True):
        if not pieces:
            continue
        figure.add_bar(
            base=[begin for begin, _, _ in pieces],
            x=[end - begin for begin, end, _ in pieces],
            y=[row for _, _, row in pieces],
            orientation="h",
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=kind + " from %{base:.3f} s for %{x:.3f} s<extra></extra>",
        )
    links = bool(bars["exchange"])
    rows = [row for r in reversed(run.replicas) for row in (*([f"{run.called(r)}, link"] * links), run.called(r))]
    figure.update_layout(barmode="overlay", bargap=0.15, height=190 + 23 * len(rows), showlegend=True)
    figure.update_yaxes(categoryorder="array", categoryarray=rows, showgrid=False)
    return figure


def _figure(x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#24292f"},
        margin={"l": 60, "r": 16, "t": 36, "b": 104},
        height=420,
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure


def _draw(
    figure: go.Figure, line: Any, name: str, colour: str, width: float = 3, dash: str | None = None, **how: Any
) -> None:
    """Adds a line; `line` is its x and y."""
    style = {"color": colour, "width": width, "dash": dash}
    mode = "lines+markers" if len(line[0]) < 2 else how.get("mode", "lines+markers")  # one point is no line
    figure.add_scatter(x=line[0], y=line[1], name=name, line=style, **{**how, "mode": mode})


def colours_of(runs: Sequence[Facts]) -> list[str]:
    """The runs' colours."""
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
