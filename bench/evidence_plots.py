"""The plots of docs/evidence.md, as SVG, from bench/results alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import evidence_tables as tables
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "farflung"  # the same file for the same results
from matplotlib import pyplot as plt  # noqa: E402

METADATA = {"Date": None}


def scatter(axes: Any, rows: Sequence[tables.Row], cost: dict[str, float]) -> None:
    """Loss against a cost, deviations over seeds as bars, the frontier as a line."""
    best = tables.on_frontier(rows, cost)
    steps = sorted((cost[row.name], mean(row.losses)) for row in rows if row.name in best and cost[row.name])
    axes.step(*zip(*steps, strict=True), where="post", color="0.6", linewidth=1, zorder=0)
    for number, row in enumerate(rows):
        if not cost[row.name]:
            axes.axhline(mean(row.losses), color=plt.cm.tab20(number), linestyle=":", label=f"{row.name} (0)")
            continue
        axes.errorbar(
            cost[row.name],
            mean(row.losses),
            yerr=stdev(row.losses) if len(row.losses) > 1 else 0,
            fmt="o" if row.name in best else "x",
            color=plt.cm.tab20(number),
            label=row.name,
        )
    axes.grid(alpha=0.3)


def frontier(path: Path) -> None:
    rows = tables.frontier_rows()
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    scatter(axes, rows, {row.name: row.megabytes for row in rows})
    axes.set_xscale("log")
    axes.set_xlabel("MB that one replica sent (dots: on the frontier)")
    axes.set_ylabel("validation loss, nats a token")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata=METADATA)


def hours(path: Path) -> None:
    rows = tables.frontier_rows()
    figure, several = plt.subplots(1, len(tables.RATES), figsize=(13, 4.8), sharey=True, layout="constrained")
    for axes, rate in zip(several, tables.RATES, strict=True):
        scatter(axes, rows, {row.name: tables.seconds_of(row.settings, rate) / 3600 for row in rows})
        axes.set_title(f"{rate} Mbit/s")
        axes.set_xlabel("simulated hours")
    several[0].set_ylabel("validation loss, nats a token")
    several[-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata=METADATA)


def scaling(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for number, gaps in enumerate(gaps for gaps in tables.all_gaps() if len(gaps.points) > 2):
        colour = plt.cm.tab10(number)
        replicas = sorted({number for number, _ in gaps.points})
        axes.plot(*zip(*gaps.points, strict=True), "o", color=colour, label=f"{gaps.method}, {gaps.batch}")
        start, slope = gaps.line(gaps.points)
        ends = (replicas[0], 256)
        axes.plot(ends, [start + slope * (n.bit_length() - 1) for n in ends], "--", color=colour, linewidth=1)
        guess, low, high = gaps.predicted(256)
        axes.errorbar(256, guess, yerr=[[guess - low], [high - guess]], color=colour, capsize=4)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("replicas")
    axes.set_ylabel("gap to ddp, % of its loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata=METADATA)
