"""The page of a simulation, with its pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from farflung.files import write_text
from farflung.planner.simulation import Simulated, simulation_table
from farflung.planner.table import figures

BLUE = "#1f6feb"
LOGARITHMIC = (0, 3)
"""Numbers of the pictures whose values may differ by powers of ten."""

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#24292f;max-width:1100px;margin:24px auto;padding:0 16px}"
    "table{border-collapse:collapse;margin:16px 0}"
    "td,th{padding:4px 12px;text-align:right;border-bottom:1px solid #d0d7de}"
    "td:first-child,th:first-child{text-align:left}small{color:#57606a;font-weight:normal}"
)


def simulation_figure(results: Sequence[Simulated]) -> go.Figure:
    """Time, waiting, use of links and bytes, one bar a method."""
    titles = ("time, seconds a round", "time blocked, %", "uplinks used, %", "sent, MB a replica and round")
    figure = make_subplots(2, 2, subplot_titles=titles, vertical_spacing=0.16)
    names = [result.name for result in results]
    values = (
        [result.timing.seconds_per_round for result in results],
        [100 * (1 - result.computing) for result in results],
        [100 * result.timing.uplink for result in results],
        [result.sent for result in results],
    )
    for number, heights in enumerate(values):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        labels = [figures(height) for height in heights]
        common = {"x": names, "y": heights, "text": labels, "showlegend": False}
        if number in LOGARITHMIC and min(heights) > 0:
            # Bars begin at 0, which a logarithmic axis does not have.
            marks = {"color": BLUE, "size": 12}
            figure.add_scatter(**common, mode="markers+text", textposition="top center", marker=marks, **place)
            figure.update_yaxes(type="log", range=_decades(heights), dtick=1, **place)
        else:
            figure.add_bar(**common, marker_color=BLUE, **place)
    figure.update_layout(template="plotly_white", height=720, margin={"l": 60, "r": 16, "t": 48, "b": 40})
    return figure


def _decades(heights: Sequence[float]) -> list[float]:
    """The powers of ten around some values."""
    return [math.floor(math.log10(min(heights))), math.ceil(math.log10(max(heights)) + 0.1)]


def write_simulation(results: Sequence[Simulated], described: str, out: Path) -> None:
    """One self-contained page: the table and its pictures."""
    title, table = "farflung: simulated rounds", simulation_table(results).html()
    picture = simulation_figure(results).to_html(full_html=False, include_plotlyjs=False)
    html = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script><h1>{title}</h1><p>{escape(described)}</p>{table}{picture}</html>"
    )
    write_text(out, html)
