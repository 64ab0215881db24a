"""One page about one run, or comparing several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from farflung.durations import duration
from farflung.events import RoundEvent, WarningEvent
from farflung.files import write_text
from farflung.methods import RECIPES, defaults_of
from farflung.report import figures
from farflung.report.comparison import best_of, best_word, bits_per_byte, verdict
from farflung.report.facts import Axis
from farflung.report.islands import islands_table, wide_table
from farflung.report.memory import latest, memory_table
from farflung.report.numbers import nbytes, number, shares
from farflung.report.page import page, picture, plotly_inside, plotly_shared, sample_html
from farflung.report.peers import last_told
from farflung.report.read import Run, missing_from, read_run
from farflung.report.rounds import Rounds

WARNINGS_SHOWN = 20

_Rows = list[tuple[str, Callable[[dict[str, Any]], str]]]
_WHERE_TOLD: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "epochs": ("epochs", lambda s: f"{s['epochs']:.3g}"),
    "epochs_of_sources": (
        "epochs of each source",
        lambda s: ", ".join(f"{name}: {epochs:.3g}" for name, epochs in s["epochs_of_sources"].items()),
    ),
    "tokens_per_second": ("trained on in a second, by all replicas", lambda s: f"{s['tokens_per_second']:,.0f}"),
    "mfu": ("of the devices' peak (MFU)", lambda s: f"{s['mfu']:.1%}"),
    "spent": ("where the replicas' time went", lambda s: shares(s["spent"])),
}
"""Rows of what only newer runs tell, or some, by its key in summaries."""

_DISTANCE_NOTE = (
    "<p>How far the replicas' weights are from their mean: the root mean square over a sample of weights. It is "
    "measured when the model is judged (<code>--eval-every</code>); where a round ends at that step, after it.</p>"
)
_COMPRESSION_NOTE = (
    "<p>The share of a message that its packet left out: 0 is nothing, 1 everything. With error feedback, the message "
    "includes what was left out before.</p>"
)


def write_report(folders: list[Path], out: Path, small: bool = False) -> list[str]:
    """Writes the report of some run folders to `out`, as a whole or not at all.

    It needs no other file, so that it can be mailed. A `small` one takes plotly's program from a file that reports
    share: it lies beside `out`, or where that is in a run folder, beside that. Returns a line for each file of which
    lines could not be read. Raises UserError when a folder holds no run.
    """
    runs = [read_run(folder) for folder in folders]
    shared = out.resolve().parent
    if len(folders) == 1 and shared == folders[0].resolve():
        shared = shared.parent
    plotly = plotly_shared(shared, out.resolve()) if small else plotly_inside()
    write_text(out, _page(runs, plotly))
    return [line for run in runs for line in run.unread()]


def _page(runs: list[Run], plotly: str) -> str:
    """The report as HTML."""
    title = f"farflung: {runs[0].name}" if len(runs) == 1 else f"farflung: {len(runs)} runs compared"
    settings, units = [_section("Settings", _settings(runs))], figures.units_of(runs)

    def each(title: str, content: Callable[[Run], str], shown: Callable[[Run], object] = lambda run: True) -> list[str]:
        """A section for each run that has something to show."""
        named = title + ": {}" if len(runs) > 1 else title
        return [_section(named.format(escape(run.name)), content(run)) for run in runs if shown(run)]

    sections = [
        _section("Results", _results(runs)),
        *(settings if len(runs) > 1 else []),
        _section(f"Loss against {units}", picture(figures.loss_figure(runs, "tokens"))),
        *_scored(runs, f"against {units}", "tokens"),
        *_against_bytes(runs),
        _section("Loss against time", _clock_note(runs) + picture(figures.loss_figure(runs, "seconds"))),
        *_scored(runs, "against time", "seconds"),
        *_consensus(runs),
        *_compression(runs),
        *each("Adaptation", lambda run: picture(figures.adaptation_figure(run)), figures.adapts),
        *each("Timeline", lambda run: _timeline_note(run) + picture(figures.timeline_figure(run))),
        *each("The latest rounds: who met whom", _latest_rounds, lambda run: run.all_of(RoundEvent)),
        *each("Inside the islands", islands_table, lambda run: run.parts),
        *each("Memory", memory_table, latest),
        *each("Other peers, as they last told", _others, lambda run: run.results().get("peers")),
        *each("Warnings", _warnings, lambda run: run.all_of(WarningEvent)),
        *each("A sample from the trained model", _sample, lambda run: run.summary),
        *(settings if len(runs) == 1 else []),
    ]
    return page(title, sections, plotly)


def _against_bytes(runs: list[Run]) -> list[str]:
    if not any(run.results().get("rounds") for run in runs):
        return []
    return [
        _section("Loss against bytes", picture(figures.loss_figure(runs, "bytes"))),
        *_scored(runs, "against bytes", "bytes"),
    ]


def _scored(runs: list[Run], against: str, axis: Axis) -> list[str]:
    """What runs are judged by that is no loss."""
    if not figures.score_traces(runs, axis):
        return []
    return [_section(escape(figures.score_title(runs, against)), picture(figures.score_figure(runs, axis)))]


def _consensus(runs: list[Run]) -> list[str]:
    if not any(run.consensus_distance() for run in runs):
        return []
    return [_section("Consensus distance", _DISTANCE_NOTE + picture(figures.consensus_figure(runs)))]


def _compression(runs: list[Run]) -> list[str]:
    if not any(map(figures.compresses, runs)):
        return []
    return [_section("Compression", _COMPRESSION_NOTE + picture(figures.compression_figure(runs)))]


def _results(runs: list[Run]) -> str:
    rows: _Rows = [
        ("method", lambda s: s["method"]),
        *_scores(runs),
        ("replicas × steps", lambda s: f"{s['replicas']} × {s.get('steps_trained', s['steps'])}"),
        ("stages × shards of a replica", lambda s: s.get("islands") or f"{s['stages']} × {s['shards']}"),
        ("parameters", lambda s: f"{s['parameters']:,}"),
        (figures.units_of(runs), lambda s: f"{s['tokens']:,}"),
        ("sent by all replicas", _sent),
        ("sending gradients every step would take", _ddp),
        ("rounds of a replica", lambda s: str(s["rounds"])),
        ("time", lambda s: duration(s["seconds"])),
        ("of it blocked", lambda s: duration(s["seconds_blocked"]) + _share(s)),
        ("consensus distance", _distance),
    ]
    results = [run.results() for run in runs]
    if any(result.get("boundary_bytes") for result in results) and not any(run.parts for run in runs):
        rows.append(("from stage to stage", lambda s: nbytes(s["boundary_bytes"])))
    rows += [row for key, row in _WHERE_TOLD.items() if any(key in result for result in results)]
    bits = [bits_per_byte(run, run.results().get(run.figure.key)) for run in runs]
    each = [(result, run.ended) for result, run in zip(results, runs, strict=True)]
    cells = [[escape(label), *(escape(_known(text, *one)) for one in each)] for label, text in rows]
    if any(bits):
        place = [label for label, _ in rows].index("replicas × steps")
        label = "mean validation loss, in bits a byte of text"
        cells.insert(place, [label, *("…" if one is None else number(one) for one in bits)])
    cells.append(["rounds of all replicas, by outcome", *(_outcomes(run) for run in runs)])
    going = "".join(f"<p>{escape(run.name)} has not ended: so far.</p>" for run in runs if not run.ended)
    missing = "".join(f"<p>{escape(run.name)}: {told}.</p>" for run in runs if (told := missing_from(run.results())))
    elsewhere = "".join(map(_elsewhere, runs))
    unread = "".join(f"<p>{escape(line)}.</p>" for run in runs for line in run.unread())
    return verdict(runs) + going + missing + elsewhere + unread + _table(runs, cells, best_of(runs))


def _scores(runs: list[Run]) -> _Rows:
    """What the runs are judged by, each figure in rows of its own."""
    rows: _Rows = []
    results = [run.results() for run in runs]
    for figure in dict.fromkeys(run.figure for run in runs):
        key, name, sources = figure.key, figure.name, figure.key_of_sources
        if all(run.is_one_peer for run in runs):
            rows.append((f"{name} of this peer", _under(key, number)))
        else:
            rows += [
                (f"{name}, mean of the replicas", _under(key, number)),
                (f"{name} of their averaged weights", _under(f"{key}_averaged", number)),
                (f"{name}, each replica", _under(f"{key}_per_replica", lambda told: ", ".join(map(number, told)))),
            ]
        if any(sources in one for one in results):
            rows.append((f"{name} of each source, mean of the replicas", _under(sources, _named)))
    for name in dict.fromkeys(name for one in results for name in one.get("others_averaged", {})):
        rows.append((f"{name} of their averaged weights", _under("others_averaged", partial(_one, name))))
    return rows


def _under(key: str, text: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
    """What a summary has under a key, as text."""
    return lambda summary: text(summary[key])


def _one(name: str, values: dict[str, float]) -> str:
    return number(values[name])


def _named(values: dict[str, float]) -> str:
    return ", ".join(f"{name}: {number(value)}" for name, value in values.items())


def _elsewhere(run: Run) -> str:
    """Which replicas are on other machines, as HTML."""
    if not run.elsewhere:
        return ""
    here = f"{len(run.replicas)} of {run.asked_for} replicas have their events in this folder"
    return (
        f"<p>{escape(run.name)}: {here}; pictures, rounds and warnings are of these alone. For all, copy the run "
        "folders of all machines together, and write the report again.</p>"
    )


def _distance(summary: dict[str, Any]) -> str:
    if summary["replicas"] == 1:
        return "none: there is one replica"
    if "sample" in summary and "weight_spread" not in summary:
        return "not known: the others' weights are not in this folder"
    return f"{summary['weight_spread']:.3g} (of {'all' if 'sample' in summary else 'sampled'} weights)"


def _known(text: Callable[[dict[str, Any]], str], results: dict[str, Any], ended: bool) -> str:
    """A figure as text, or dots where a run does not have it yet, and a dash where it never will."""
    try:
        return text(results)
    except KeyError:
        return "–" if ended else "…"


def _outcomes(run: Run) -> str:
    counts = Counter(event.outcome for event in run.all_of(RoundEvent))
    return escape(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common())) or "none"


def _settings(runs: list[Run]) -> str:
    names = sorted({name for run in runs for name in run.settings} - {"out"})
    if len(runs) > 1:
        names = [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]
        intro = "<p>Only settings in which the runs differ.</p>"
    else:
        intro = ""
    cells = [[escape(name), *(escape(_setting(run, name)) for run in runs)] for name in names]
    return intro + _table(runs, cells)


def _setting(run: Run, name: str) -> str:
    method = str(run.settings.get("method"))
    unset = "method's default" if method in RECIPES and name in defaults_of(method) else "unset"
    return str(run.settings.get(name, unset))


def _table(runs: list[Run], cells: list[list[str]], best: int | None = None) -> str:
    heads = [
        f'<span class="run" style="background:{figures.COLOURS[i % len(figures.COLOURS)]}"></span>{escape(run.name)}'
        for i, run in enumerate(runs)
    ]
    if best is not None:
        heads[best] += f'<br><span class="best">{best_word(runs[best])}</span>'
    return wide_table(["", *heads], cells)


def _warnings(run: Run) -> str:
    warnings = run.all_of(WarningEvent)
    items = [f"<li>{run.at(w.step)}{_whose(run, w)}: {escape(w.message)}</li>" for w in warnings[:WARNINGS_SHOWN]]
    more = f"<p>… and {len(warnings) - WARNINGS_SHOWN} more.</p>" if len(warnings) > WARNINGS_SHOWN else ""
    return f"<ul>{''.join(items)}</ul>{more}"


def _whose(run: Run, warning: WarningEvent) -> str:
    return "" if run.is_one_peer else f", replica {warning.replica}"


def _latest_rounds(run: Run) -> str:
    rounds = Rounds()
    for event in run.all_of(RoundEvent):
        rounds.add(event)
    return rounds.html(run.replicas, run.ranks)


def _others(run: Run) -> str:
    return "".join(f"<li>{escape(told)}</li>" for told in last_told(run.results()["peers"]))


def _sample(run: Run) -> str:
    summary = run.results()
    return sample_html(summary["sample"], summary.get("sample_picture"))


def _timeline_note(run: Run) -> str:
    if any(len(run.of(replica, RoundEvent)) > figures.ROUNDS_SHOWN for replica in run.replicas):
        return f"<p>The last {figures.ROUNDS_SHOWN} rounds of each replica.</p>"
    return ""


def _clock_note(runs: list[Run]) -> str:
    simulated = [run.name for run in runs if run.settings.get("network") == "simulated"]
    return f"<p>Virtual time on the simulated network: {escape(', '.join(simulated))}.</p>" if simulated else ""


def _sent(summary: dict[str, Any]) -> str:
    """Without a round, only notes are sent, such as those in which replicas compare what they start from."""
    notes = summary["bytes_sent"] and not summary["rounds"]
    return nbytes(summary["bytes_sent"]) + (", for the start alone: no round was held" if notes else "")


def _ddp(summary: dict[str, Any]) -> str:
    sent, ddp = summary["bytes_sent"], summary["ddp_bytes"]
    if sent and not ddp:
        return "not known: the others' runs are not in this folder"
    return nbytes(ddp) + (f" ({ddp / sent:.0f} times as much)" if sent and summary["rounds"] else "")


def _share(summary: dict[str, Any]) -> str:
    return f" ({summary['seconds_blocked'] / summary['seconds']:.1%})" if summary["seconds"] else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"
