"""The pictures of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go

from farflung.events import EvaluationEvent, ProgressEvent, RoundEvent, StepEvent
from farflung.report.comparison import bits_per_byte, unlike_tokens
from farflung.report.read import P, Run, mean

Line = tuple[list[float], list[float | None]]
"""The x and y of a line's points; None interrupts the line."""

COLOURS = ("#1f6feb", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#5c6770", "#b5651d", "#3a3a8c")
"""One colour a run, the same in every picture."""

WORK, EXCHANGE, WAITING = "#9ecae1", "#f2b366", "#c0392b"
ROUNDS_SHOWN = 200
"""The most rounds of a replica that a timeline shows: its last ones."""

AXES = {"bytes": "megabytes sent, all replicas together", "seconds": "seconds"}
_SCALE = {"tokens": 1.0, "bytes": 1e-6, "seconds": 1.0}


def units_of(runs: list[Run]) -> str:
    """The units of these runs' samples, such as tokens."""
    return " or ".join(dict.fromkeys(run.units for run in runs))


def loss_figure(runs: list[Run], axis: str) -> go.Figure:
    """The replicas' mean losses against `axis` (tokens, bytes or seconds): validation, and lighter, training."""
    bits = unlike_tokens(runs) and all(run.bytes_per_unit for run in runs)
    measures = "bits a byte" if bits else " or ".join(dict.fromkeys(run.measure for run in runs))
    figure = _figure(AXES.get(axis, f"{units_of(runs)}, all replicas together"), f"loss, {measures}")
    for colour, run in zip(_colours(runs), runs, strict=True):
        told = partial(bits_per_byte, run) if bits else _same
        training = _mean_line(run, StepEvent, lambda event: told(event.loss), axis)  # noqa: B023
        _draw(figure, training, f"{run.name}, training", colour, width=1.5, mode="lines", opacity=0.45)
        for replica in run.replicas if len(runs) == 1 else ():
            line = _replica_line(run, replica, axis)
            _draw(figure, line, run.called(replica), colour, width=1, dash="dot", mode="lines", opacity=0.6)
        validation = _mean_line(run, EvaluationEvent, lambda event: told(event.validation_loss), axis)  # noqa: B023
        _draw(figure, validation, f"{run.name}, validation", colour)
    return figure


def _same(loss: float | None) -> float | None:
    return loss


def consensus_figure(runs: list[Run]) -> go.Figure:
    """The consensus distance of the replicas, against steps."""
    figure = _figure("inner steps", "rms of sampled weights")
    for colour, run in zip(_colours(runs), runs, strict=True):
        distances = run.consensus_distance()
        _draw(figure, (list(distances), list(distances.values())), run.name, colour)
    return figure


def compression_figure(runs: list[Run]) -> go.Figure:
    """The share of messages that packets left out, against steps; the mean of the replicas."""
    figure = _figure("inner steps", "left out, share of the norm")
    for colour, run in zip(_colours(runs), runs, strict=True):
        _draw(figure, _by_started_step(run, lambda event: event.compression_error), run.name, colour)
    figure.update_yaxes(rangemode="tozero")
    return figure


def adaptation_figure(run: Run) -> go.Figure:
    """An adapting run's effective rank, steps between rounds, and bytes of a round."""
    figure = _figure("inner steps", "in per cent of the first round's")
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
        figure.add_bar(
            base=[begin for begin, _, _ in pieces],
            x=[end - begin for begin, end, _ in pieces],
            y=[row for _, _, row in pieces],
            orientation="h",
            name=kind,
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=kind + " from %{base:.3f} s for %{x:.3f} s<extra></extra>",
        )
    rows = [row for r in reversed(run.replicas) for row in (f"{run.called(r)}, link", run.called(r))]
    figure.update_layout(barmode="overlay", bargap=0.15, height=190 + 46 * len(run.replicas))
    figure.update_yaxes(categoryorder="array", categoryarray=rows, gridcolor="white")
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


def _mean_line(run: Run, kind: type[P], value: Callable[[P], float | None], axis: str) -> Line:
    xs: list[float] = []
    ys: list[float | None] = []
    for step, events in run.by_step(kind).items():
        if (height := mean([value(event) for event in events])) is not None:
            xs.append(_position(run, step, events, axis))
            ys.append(height)
    return xs, ys


def _replica_line(run: Run, replica: int, axis: str) -> Line:
    """One replica's validation loss, at the place on the axis that all replicas together had reached."""
    xs, ys = [], []
    for step, events in run.by_step(EvaluationEvent).items():
        for event in events:
            if event.replica == replica:
                xs.append(_position(run, step, events, axis))
                ys.append(event.validation_loss)
    return xs, ys


def _position(run: Run, step: int, events: Sequence[ProgressEvent], axis: str) -> float:
    if axis == "seconds":
        return max(event.at for event in events)
    everyone = run.up_to(step, events)
    return sum(event.tokens if axis == "tokens" else event.bytes_sent for event in everyone) * _SCALE[axis]


def _colours(runs: list[Run]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(runs))]
