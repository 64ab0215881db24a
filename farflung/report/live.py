"""The live view of a run: a table that is kept up to date on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from farflung.durations import duration
from farflung.events import EvaluationEvent, Event, MemoryEvent, StartEvent, StepEvent, WarningEvent
from farflung.report import peers
from farflung.report.facts import more_figures
from farflung.report.memory import latest, memory_line
from farflung.report.numbers import nbytes, number, shares
from farflung.report.read import Run, mean

PLAIN_SECONDS, PLAIN_SHARE = 10.0, 0.05
"""A plain line comes after so many seconds, or after that share of the steps if that is sooner."""

WARNINGS_SHOWN = 3

Others = Callable[[], list[peers.Row]]
"""What is known of the other peers now."""


def watch(
    run: Run,
    finished: threading.Event,
    console: Console | None = None,
    refresh_seconds: float = 0.5,
    others: Others | None = None,
) -> None:
    """Shows a run until `finished` is set, and then its last state; plain lines leave out what had been read before.

    `others` says of a peer on the internet what it knows of the others.
    """
    console = console or Console()
    if console.is_terminal:
        _watch_on_terminal(run, finished, console, refresh_seconds, others)
    else:
        _watch_plainly(run, finished, console, refresh_seconds, others)


def _watch_on_terminal(
    run: Run, finished: threading.Event, console: Console, refresh_seconds: float, others: Others | None
) -> None:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[reached]} ·"),
        TimeElapsedColumn(),
        TextColumn("gone ·"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )
    task = progress.add_task("starting", total=None, reached="")
    # What is printed meanwhile, such as a ticket, may go to a file.
    with Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty()) as live:
        done = False
        while not done:
            done = finished.wait(refresh_seconds)
            run.refresh()
            first = next(iter(run.all_of(StartEvent)), None)
            if first:
                total, completed = _steps(run), _slowest_step(run)
                progress.update(task, description=first.method, total=total, completed=completed, reached=_reached(run))
            beside: list[RenderableType] = [peers.table(others(), "other peer"), Text()] if others else []
            live.update(Group(progress, table(run), *beside, *_notes(run)), refresh=True)


def _watch_plainly(
    run: Run, finished: threading.Event, console: Console, refresh_seconds: float, others: Others | None
) -> None:
    # By identity: an event may be read late, and stand before others that were told.
    told: dict[int, Event] = {
        id(event): event
        for kind in (StartEvent, MemoryEvent, EvaluationEvent, WarningEvent)
        for event in run.all_of(kind)
    }
    told_step, told_at = _slowest_step(run), time.monotonic()
    done = False
    while not done:
        done = finished.wait(refresh_seconds)
        run.refresh()
        for start in run.all_of(StartEvent):
            if id(start) not in told:
                if start.resumed and (whose := _who_goes_on(run, start)) is not None:
                    _print(console, f"{whose}goes on from {run.at(start.step)}")
                told[id(start)] = start
                told_step = min(told_step, start.step)
        # The others' plans are much the same.
        for plan in [event for replica in run.replicas[:1] for event in run.of(replica, MemoryEvent)]:
            if id(plan) not in told:
                _print(console, memory_line(plan))
                told[id(plan)] = plan
        evaluations = run.by_step(EvaluationEvent)
        untold = [step for step, events in evaluations.items() if not any(id(event) in told for event in events)]
        distances = run.consensus_distance() if untold else {}
        lines = [(one, 1, _evaluation_line(run, one, evaluations[one], distances.get(one))) for one in untold]
        told |= {id(event): event for one in untold for event in evaluations[one]}
        if (step := _slowest_step(run)) > told_step and (done or _is_due(step - told_step, told_at, step, _steps(run))):
            beside = [peers.line(others())] if others else []
            lines.append((step, 0, "\n".join([plain_line(run), *beside])))  # before how that step is judged
            told_step, told_at = step, time.monotonic()
        for _, _, line in sorted(lines):
            _print(console, line)
        for warning in run.all_of(WarningEvent):
            if id(warning) not in told:
                _print(console, f"warning: {_whose(run, warning)}{warning.message}")
                told[id(warning)] = warning


def _is_due(untold_steps: int, told_at: float, step: int, steps: int) -> bool:
    """Whether the state is to be told in a line again; the last step's always is, before the run's end."""
    return time.monotonic() - told_at >= PLAIN_SECONDS or untold_steps >= PLAIN_SHARE * steps or step == steps


def _evaluation_line(run: Run, step: int, events: Sequence[EvaluationEvent], distance: float | None) -> str:
    apart = "" if distance is None else f" · consensus distance {distance:.3g} (of sampled weights)"
    score = number(mean([event.score for event in events]))
    more = "".join(f" · {name} {number(value)}" for name, value in more_figures(events).items())
    return f"{run.at(step)}{_of_whom(run)} · {run.figure.name} {score}{more}{apart}"


def table(run: Run) -> Table:
    """One row a replica: its losses, its speed, and what it has sent and waited for."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    alone, crosses = run.is_one_peer, run.boundary_bytes > 0
    measured = any(step.mfu for replica in run.replicas for step in run.of(replica, StepEvent)[-1:])
    for heading in (
        "" if alone else "replica",
        "at" if run.by_clock else "step",
        "loss",
        run.figure.heading,
        f"{run.units}/s",
        *(["MFU"] if measured else []),
        "rounds",
        "sent",
        *(["to stages"] if crosses else []),
        "blocked",
    ):
        shown.add_column(heading, justify="right")
    for replica in run.replicas:
        steps, evaluations = run.of(replica, StepEvent), run.of(replica, EvaluationEvent)
        score = number(evaluations[-1].score) if evaluations else "…"
        if steps:
            last = steps[-1]
            values = (
                run.at(last.step).removeprefix("step "),
                number(last.loss),
                score,
                f"{last.tokens_per_second:,.0f}",
                *([f"{last.mfu or 0:.1%}"] if measured else []),
                str(last.rounds),
                nbytes(last.bytes_sent),
                *([nbytes(last.boundary_bytes)] if crosses else []),
                duration(last.seconds_blocked),
            )
        else:
            values = (
                "0",
                "…",
                score,
                "…",
                *(["…"] if measured else []),
                "0",
                nbytes(0),
                *([nbytes(0)] if crosses else []),
                duration(0),
            )
        shown.add_row("this peer" if alone else str(replica), *values)
    return shown


def plain_line(run: Run) -> str:
    """The state of all replicas whose events are here, in one line."""
    last = [steps[-1] for replica in run.alive if (steps := run.of(replica, StepEvent))]
    everyone = [steps[-1] for replica in run.replicas if (steps := run.of(replica, StepEvent))]
    sent, held = sum(event.bytes_sent for event in everyone), any(event.rounds for event in everyone)
    parts = [
        f"{_reached(run)}{_of_whom(run)}",
        f"loss {number(mean([event.loss for event in last]))}",
        f"{sum(event.tokens_per_second for event in last):,.0f} {run.units}/s",
        *([f"MFU {sum(used) / len(used):.1%}"] if (used := [event.mfu for event in last if event.mfu]) else []),
        f"sent {'' if run.is_one_peer or run.elsewhere or len(run.replicas) == 1 else 'by all '}{nbytes(sent)}"
        + (" (no round yet)" if sent and not held else ""),
        *([f"from stage to stage {nbytes(run.boundary_bytes)}"] if run.boundary_bytes else []),
        f"blocked {duration(sum(event.seconds_blocked for event in last) / max(1, len(last)))}",
    ]
    return " · ".join(parts)


def _of_whom(run: Run) -> str:
    """Of which replicas a line tells, where other machines have the others' events."""
    return f" · on this machine {len(run.replicas)} of {run.asked_for} replicas" if run.elsewhere else ""


def _notes(run: Run) -> list[Text]:
    notes = []
    spent = Counter[str]()
    for replica in run.alive:
        for last in run.of(replica, StepEvent)[-1:]:
            spent.update(last.spent or {})
    if spent:
        notes.append(Text(f"time goes to {shares(spent)}"))
    notes += [Text(memory_line(event)) for event in latest(run)[:1]]
    judged = [event for replica in run.alive for event in run.of(replica, EvaluationEvent)[-1:]]
    if more := more_figures(judged):
        at = run.at(max(event.step for event in judged))
        notes.append(Text(f"{', '.join(f'{name} {number(value)}' for name, value in more.items())} at {at}"))
    for step, distance in list(run.consensus_distance().items())[-1:]:
        often = f", each {every} steps" if (every := run.settings.get("eval_every")) and not run.by_clock else ""
        measured = f"of sampled weights, measured with the {run.figure.name}{often}"
        notes.append(Text(f"consensus distance {distance:.3g} at {run.at(step)} ({measured})"))
    for warning in run.all_of(WarningEvent)[-WARNINGS_SHOWN:]:
        notes.append(Text(f"{_whose(run, warning)}{warning.message}", style="yellow"))
    return notes


def _whose(run: Run, event: Event) -> str:
    """Whose line it is, where there are several that it could be of."""
    return "" if run.is_one_peer else f"replica {event.replica}: "


def _who_goes_on(run: Run, start: StartEvent) -> str | None:
    """Whose line it is that a replica goes on; None where another's tells it, since all go on together."""
    if run.settings.get("independent"):
        return _whose(run, start)
    return "" if start.replica == run.alive[0] else None


def _reached(run: Run) -> str:
    """How far the run is, of how much."""
    step, steps = run.at(_slowest_step(run)), run.at(_steps(run))
    return f"{step} of {steps}" if run.by_clock else f"{step}/{steps.removeprefix('step ')}"


def _slowest_step(run: Run) -> int:
    """The step that every living replica has reached."""
    return min((steps[-1].step if (steps := run.of(r, StepEvent)) else 0 for r in run.alive), default=0)


def _steps(run: Run) -> int:
    """The steps that the run is to have."""
    starts = reversed(run.all_of(StartEvent))  # of those at one step the last: more may be asked for when it goes on
    return max(starts, key=lambda start: start.step).steps


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
