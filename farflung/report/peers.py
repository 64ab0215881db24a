"""The peers of a run on the internet, as `farflung status` shows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table

from farflung.errors import counted
from farflung.report.live import number

Row = dict[str, Any]
REFRESH_SECONDS = 3.0


def show(source: Callable[[], list[Row]], finished: threading.Event, once: bool) -> None:
    """Shows what `source` says of each peer: once, or every few seconds until `finished`."""
    console = Console()
    if once or not console.is_terminal:
        console.print(table(source()))
        while not once and not finished.wait(REFRESH_SECONDS * 5):
            console.print(table(source()))
        return
    with Live(table(source()), console=console, auto_refresh=False) as live:
        while not finished.wait(REFRESH_SECONDS):
            live.update(table(source()), refresh=True)


def table(rows: list[Row]) -> Table:
    """One row a peer: its host, state, loss and speed, and how long ago it was heard."""
    trains = sum(row["state"] == "trains" for row in rows)
    speed = sum(row.get("tokens_per_second", 0.0) for row in rows if row["state"] == "trains")
    title = f"{counted(trains, 'peer')} in training · {speed:,.0f} tokens/s"
    shown = Table(title=title, box=None, padding=(0, 1, 0, 0))
    for heading in (
        "replica",
        "host",
        "processes",
        "state",
        "step",
        "behind",
        "loss",
        "tokens\n/s",
        "rounds",
        "refused",
        "heard,\ns ago",
    ):
        side: Literal["left", "right"] = "left" if heading in ("host", "state") else "right"
        # Where a terminal is too narrow for all, only hosts' names go over several lines.
        shown.add_column(heading, justify=side, no_wrap=heading != "host", overflow="fold")
    for row in rows:
        trains_or_did = row["state"] != "bootstrap"
        shown.add_row(
            str(row["replica"]),
            row["host"],
            f"{row.get('processes', 1):.0f}" if trains_or_did else "",
            row["state"],
            str(row["step"]) if trains_or_did else "",
            f"{row['behind']:.0f}" if row["state"] == "trains" else "",
            number(row["loss"]) if "loss" in row else "…" if trains_or_did else "",
            f"{row['tokens_per_second']:,.0f}" if "tokens_per_second" in row else "",
            str(row["rounds"]) if "rounds" in row else "",
            str(row.get("refused", "")),
            f"{row['heard']:.0f}",
        )
    return shown
