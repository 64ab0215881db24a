"""What the page says of a run that is followed, beside its pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING

from farflung.durations import duration
from farflung.report.facts import more_figures
from farflung.report.islands import wide_table
from farflung.report.numbers import nbytes, number
from farflung.report.page import sample_html
from farflung.report.watching.replica import OVER, Replica
from farflung.report.watching.watched import Shown

if TYPE_CHECKING:
    from farflung.report.watching.followed import Followed

MOST_NAMED = 6
"""The most replicas of one fault that have a line each."""
MUCH_BLOCKED = 0.3
"""A replica that stands still for more of its time is warned of."""
HIGH = 12
"""Rows from which a table scrolls up and down."""
DOTS = "…"


def shown(run: Followed) -> Shown:
    """All of it."""
    summary, last = run.summary or {}, run.kept.text
    text, png = (last.text, last.picture) if last else ("", None)
    if "sample" in summary:
        text, png = summary["sample"], summary.get("sample_picture")
    when = "at the end" if "sample" in summary else f"after {run.at(last.step)}" if last else ""
    return Shown(
        facts=_facts(run),
        warnings=[*_now(run), *_told(run)],
        sections={
            "Replicas": _table(run),
            "The latest rounds: who met whom": run.kept.rounds.html(run.replicas, run.kept.ranks),
            "What the model makes": f'<p class="muted">{when}</p>{sample_html(text, png)}' if text or png else "",
        },
    )


def _facts(run: Followed) -> dict[str, str]:
    """A column of figures, as HTML."""
    replicas = list(run.kept.replicas.values())
    there = [one for one in replicas if run.state(one) not in ("died", "dead")]
    steps = max((start.steps for start in run.starts), default=0)
    step = min((one.step for one in there), default=0)
    word, (at, end) = "at" if run.by_clock else "step", (run.at(one).removeprefix("step ") for one in (step, steps))
    lines = [one.last for one in replicas if one.last]
    speed = sum(one.last.tokens_per_second for one in there if one.last and run.state(one) == "trains")
    judged = [one.evaluation for one in there if one.evaluation]
    curves = {what: run.kept.curves[what].last for what in ("training", "score", "distance")}
    distance = curves["distance"]
    return {
        "method": escape(str(run.settings.get("method") or next((start.method for start in run.starts), DOTS))),
        "state": escape(_state(run)),
        word: f'{at} of {end} <progress value="{step}" max="{max(1, steps)}"></progress>',
        escape(run.figure.name): _loss(curves["score"]),
        **{escape(name): number(value) for name, value in more_figures(judged).items()},
        "training loss": _loss(curves["training"]),
        escape(run.units): f"{sum(line.tokens for line in lines):,}"
        + (f", {speed:,.0f} a second now" if speed else ""),
        "sent": nbytes(sum(line.bytes_sent for line in lines)),
        "rounds of a replica": str(max((line.rounds for line in lines), default=0)),
        "blocked": _share(sum(line.seconds_blocked for line in lines), sum(line.at for line in lines)),
        "consensus distance": DOTS
        if distance is None
        else f"{distance:.3g} (of sampled weights, at the last evaluation)",
        "time": _time(run, step, steps),
    }


def _state(run: Followed) -> str:
    """What the replicas do, counted."""
    states = [run.state(one) for one in run.kept.replicas.values()]
    if not states:
        return "has not begun"
    kinds = {state: states.count(state) for state in dict.fromkeys(states)}
    if len(kinds) == 1:
        return states[0]
    return ", ".join(f"{count} {'train' if state == 'trains' else state}" for state, count in kinds.items())


def _time(run: Followed, step: int, steps: int) -> str:
    at = max((one.at for one in run.kept.replicas.values()), default=0.0)
    told = duration(at, 0)
    if run.settings.get("network") == "simulated":
        return f"{told} (simulated)"
    trains = any(run.state(one) == "trains" for one in run.kept.replicas.values())
    return f"{told}, about {duration(at / step * (steps - step), 0)} left" if trains and 0 < step < steps else told


def _table(run: Followed) -> str:
    """A row for each replica."""
    replicas = [run.kept.replicas[number] for number in run.replicas]
    if not replicas:
        return ""
    foremost = max(one.step for one in replicas)
    columns: dict[str, Callable[[Replica], str]] = {
        "": lambda one: escape(run.called(one.number)) if run.is_one_peer else str(one.number),
        "state": lambda one: _marked(run.state(one)),
        "step": lambda one: str(one.step),
        "behind": lambda one: str(foremost - one.step),
        "loss": lambda one: _loss(one.last.loss if one.last else None, one.last is not None),
        escape(run.figure.heading): lambda one: _loss(
            one.evaluation.score if one.evaluation else None, one.evaluation is not None
        ),
        f"{escape(run.units)}/s": lambda one: f"{one.last.tokens_per_second:,.0f}" if one.last else DOTS,
        "blocked": lambda one: _share(one.last.seconds_blocked, one.last.at) if one.last else DOTS,
        "rounds": lambda one: str(one.last.rounds) if one.last else "0",
        "since round": lambda one: run.span(one.step - one.round_steps[-1]) if one.round_steps else DOTS,
        "sent": lambda one: nbytes(one.last.bytes_sent if one.last else 0),
    }
    if any(one.last and one.last.mfu for one in replicas):
        columns["MFU"] = lambda one: f"{one.last.mfu:.1%}" if one.last and one.last.mfu else DOTS
    if any(run.state(one) not in OVER for one in replicas):
        columns["heard"] = lambda one: "" if run.state(one) in OVER else f"{duration(one.quiet_s(run.now), 0)} ago"
    if any(one.last and one.last.refused for one in replicas):
        columns["refused"] = lambda one: str(sum((one.last.refused or {}).values()) if one.last else 0)
    rows = [[cell(one) for cell in columns.values()] for one in replicas]
    return wide_table(list(columns), rows, high=len(rows) > HIGH)


def _now(run: Followed) -> Iterator[str]:
    """What is wrong now, as HTML."""
    if run.fault:
        yield escape(run.fault)
    replicas = [run.kept.replicas[number] for number in run.replicas]
    faults: dict[str, Callable[[Replica], str]] = {
        "dead or silent": lambda one: _death(run, one),
        "without a finite loss": lambda one: _not_finite(run, one),
        "late for a round": lambda one: (
            f"has had no round for {run.span(one.late_for_round())}, more than twice as long as before"
            if one.late_for_round() and run.state(one) == "trains"
            else ""
        ),
        "waiting for others": lambda one: (
            f"stands still for {one.last.seconds_blocked / one.last.at:.0%} of its time, waiting for others"
            if one.last and one.last.seconds_blocked > MUCH_BLOCKED * one.last.at > 0 and run.state(one) == "trains"
            else ""
        ),
    }
    for what, fault in faults.items():
        told = [(one, line) for one in replicas if (line := fault(one))]
        named = told if len(told) <= MOST_NAMED else told[: MOST_NAMED - 1]
        for one, line in named:
            yield f"<b>{escape(run.called(one.number))}</b> {escape(line)}"
        if len(told) > len(named):
            yield f"{len(told) - len(named)} more replicas are {what}"


def _death(run: Followed, one: Replica) -> str:
    return {
        "died": f"has died, at step {one.step}; the others go on without it",
        "dead": f"is dead: its process has ended without a word, after step {one.step}",
        "silent": f"is silent: it has written nothing for {duration(one.quiet_s(run.now), 0)}, since step {one.step}",
    }.get(run.state(one), "")


def _not_finite(run: Followed, one: Replica) -> str:
    """Where its last losses are NaN or infinite."""
    if one.last and one.last.loss is None:
        return f"has a training loss that is not finite, at step {one.last.step}"
    if one.evaluation and one.evaluation.score is None:
        return f"has a {run.figure.name} that is not finite, at step {one.evaluation.step}"
    return ""


def _told(run: Followed) -> Iterator[str]:
    """What the replicas have warned of, the latest first, as HTML."""
    for warning in reversed(run.kept.warnings):
        whose = "" if run.is_one_peer else f"{run.called(warning.replica)}, "
        yield f'<span class="muted">{escape(f"{whose}step {warning.step}:")}</span> {escape(warning.message)}'


def _marked(state: str) -> str:
    return f'<span class="bad">{state}</span>' if state in ("dead", "died", "silent") else state


def _loss(value: float | None, known: bool = False) -> str:
    return DOTS if value is None and not known else number(value)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else DOTS
