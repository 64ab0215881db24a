"""The peers of a run on the internet, as `farflung status` shows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.table import Table

from farflung.durations import duration
from farflung.errors import counted
from farflung.report.numbers import nbytes, number

Row = dict[str, Any]
REFRESH_SECONDS = 3.0
STATES = TRAINS, BEGINS, OBSERVES, GONE, BOOTSTRAP = "trains", "begins", "observes", "gone", "bootstrap"
"""What a peer does, as they are listed."""
ANY_PEER = "peer"
"""What a row is called where who looks is no peer of the run itself."""
WHOLE = 1000
"""Columns of characters where no terminal says how many there are."""
NAMED = 3
"""Peers that one line names."""


def show(source: Callable[[], list[Row]], finished: threading.Event, once: bool) -> None:
    """Shows what `source` says of each peer: once, or every few seconds until `finished`."""
    console = Console()
    if not console.is_terminal:
        console.width = WHOLE  # who reads a file or a pipe gets all of each line
    if once or not console.is_terminal:
        console.print(table(source()))
        while not once and not finished.wait(REFRESH_SECONDS * 5):
            console.print(table(source()))
        return
    with Live(table(source()), console=console, auto_refresh=False) as live:
        while not finished.wait(REFRESH_SECONDS):
            live.update(table(source()), refresh=True)


def table(rows: list[Row], what: str = ANY_PEER) -> Table:
    """One row a peer, those in training first: its step, loss and speed, and how long ago it was heard.

    Below them is why some were alone in their last round, of a swarm what each stage can do, and that nobody trains.
    """
    trains = [row for row in rows if row["state"] == TRAINS]
    alone = [f"{row['name']}: {row['alone']}" for row in ordered(trains) if row.get("alone")]
    over = what == ANY_PEER and not any(row["state"] in (TRAINS, BEGINS) for row in rows)
    notes = ["nobody trains now: the run may be over, or has not begun"] if over else []
    speed = sum(row.get("tokens_per_second", 0.0) for row in trains if not row.get("stage"))  # the others' are the same
    shown = Table(
        title=f"{counted(len(trains), what)} in training · {speed:,.0f} tokens/s",
        title_justify="left",
        caption="\n".join([*stages_of(rows), *alone, *notes]),
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    headings, cells = cells_of(rows)
    for heading in headings:
        side: Literal["left", "right"] = "left" if heading in ("peer", "state") else "right"
        # Where a terminal is too narrow for all, only names go over several lines.
        shown.add_column(heading, justify=side, no_wrap=heading != "peer", overflow="fold")
    for row in cells:
        shown.add_row(*row)
    return shown


def cells_of(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """The headings of a table of peers, and its cells."""
    columns = dict(_COLUMNS)
    if any("stages" in row for row in rows):
        columns |= _IN_SWARMS
    columns |= {fact.replace("_", " "): cell for fact, cell in _IF_ANY.items() if any(row.get(fact) for row in rows)}
    return list(columns), [[cell(row) for cell in columns.values()] for row in ordered(rows)]


def stages_of(rows: list[Row]) -> list[str]:
    """A line for each stage of a swarm: who serves it, and what they can do; all wait for the stage with the least.

    None where all peers are gone, as at a run's end.
    """
    there = [row for row in rows if row["state"] in (TRAINS, BEGINS)]
    count = max((row.get("stages", 0) for row in there), default=0)
    serving = [[row for row in there if row.get("stage") == stage] for stage in range(count)]
    able = [sum(row.get("capacity", 0.0) for row in peers) for peers in serving]
    told = []
    for stage, peers in enumerate(serving):
        queue = sum(row.get("queue", 0.0) for row in peers)
        what = f"{counted(len(peers), 'peer')}, up to {able[stage]:,.1f} microbatches/s, {queue:.0f} waiting"
        slowest = " · the bottleneck" if able[stage] == min(able) else ""
        told.append(f"stage {stage}: {what if peers else 'nobody serves it: join, and it is yours'}{slowest}")
    return told


def line(rows: list[Row]) -> str:
    """The other peers in training, in one line."""
    trains = [row for row in ordered(rows) if row["state"] == TRAINS]
    told = [f"{row['name']} at step {row['step']}{_loss_of(row)}" for row in trains[:NAMED]]
    more = [f"{len(trains) - NAMED} more"] if len(trains) > NAMED else []
    return " · ".join([counted(len(trains), "other peer"), *told, *more])


def last_told(rows: list[Row]) -> list[str]:
    """A line for each of the other peers, with what it has told last."""
    width = max((len(row["name"]) for row in rows), default=0)
    return [
        f"{row['name']:{width}}  step {row['step']}{_loss_of(row)}, {counted(int(row.get('rounds', 0)), 'round')}"
        + ("" if row["state"] == TRAINS else f", {row['state']}")
        for row in ordered(rows)
        if row["state"] not in (BOOTSTRAP, OBSERVES)
    ]


def ordered(rows: list[Row]) -> list[Row]:
    """Peers as they are listed: by state, then by name."""
    return sorted(rows, key=lambda row: (STATES.index(row["state"]), row["name"]))


def _loss_of(row: Row) -> str:
    return f", loss {number(row['loss'])}" if "loss" in row else ""


def _of_trainers(cell: Callable[[Row], str]) -> Callable[[Row], str]:
    """A cell that is empty for who does not train, and has dots before there is anything to tell."""

    def shown(row: Row) -> str:
        try:
            return "" if row["state"] in (BOOTSTRAP, OBSERVES) else cell(row)
        except KeyError:
            return "…"

    return shown


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "peer": lambda row: str(row["name"]),
    "state": lambda row: str(row["state"]),
    "step": _of_trainers(lambda row: str(row["step"])),
    "behind": _of_trainers(lambda row: f"{row['behind']:.0f}" if row["state"] == TRAINS else ""),
    "loss": _of_trainers(lambda row: number(row["loss"])),
    "tokens/s": _of_trainers(lambda row: f"{row['tokens_per_second']:,.0f}" if row["state"] == TRAINS else ""),
    "rounds": _of_trainers(lambda row: f"{row['rounds']:.0f}"),
    "heard": lambda row: f"{duration(row['heard'], 0)} ago",
}
_IN_SWARMS: dict[str, Callable[[Row], str]] = {
    "stage": _of_trainers(lambda row: str(row["stage"])),
    "queue": _of_trainers(lambda row: f"{row['queue']:.0f}"),
    "microbatches/s": _of_trainers(lambda row: f"{row['microbatches_per_second']:,.1f}"),
    "sent": _of_trainers(lambda row: nbytes(row["sent"])),
}
"""Columns of a swarm's peers."""
_IF_ANY: dict[str, Callable[[Row], str]] = {
    "processes": _of_trainers(lambda row: f"{row.get('processes', 1):.0f}"),
    "refused": _of_trainers(lambda row: f"{row.get('refused', 0):.0f}"),
    "bypassed": _of_trainers(lambda row: f"{row.get('bypassed', 0):.0f}"),
    "core_only": _of_trainers(lambda row: "yes" if row.get("core_only") else ""),
    "requests": _of_trainers(lambda row: f"{row.get('requests', 0):,.0f}"),
}
"""Columns by facts, that are there if any peer has such."""
