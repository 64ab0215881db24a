"""What a finished run came to, as its last lines."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, TextIO

from farflung.durations import duration
from farflung.errors import counted
from farflung.figure import LOSS, Figure
from farflung.files import event_files


def tell_result(folder: Path, to: TextIO | None = None, simulated: bool = False) -> None:
    """What a finished run came to, and where to read more."""
    from farflung.report import missing_from

    if not (folder / "summary.json").exists():
        return  # all replicas have died
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    sent = summary["bytes_sent"]
    ddp = summary["ddp_bytes"]
    without = f"{told}\n" if (told := missing_from(summary)) else ""
    took = f"took {duration(summary['seconds'])} of simulated time\n" if simulated else ""
    sender = "this peer" if "peers" in summary else "all replicas"
    fewer = f", {ddp / sent:.0f} times fewer than ddp's {ddp / 1e6:,.1f} MB" if sent and ddp else ""
    held = summary["rounds"]  # without a round, only notes are sent
    traffic = f"sent by {sender}: {sent / 1e6:,.1f} MB{fewer}" if held else "no round was held"
    crossed = summary["boundary_bytes"]
    between = f"; from stage to stage: {crossed / 1e6:,.1f} MB" if crossed else ""
    print(
        f"\n{_losses(summary)}\n"
        f"{_speed(summary)}{traffic}{between}\n{took}{without}\n"
        f"{_sample_of(folder, summary)}"
        f"run folder {folder}\nreport     {_report_of(folder)}",
        file=to,
    )


def _speed(summary: dict[str, Any]) -> str:
    """Its units a second, and where the time went, as lines."""
    from farflung.report.numbers import shares

    if not (spent := summary.get("spent")):
        return ""  # simulated, or of an earlier version
    used = f", {mfu:.1%} of the devices' peak (MFU)" if (mfu := summary.get("mfu")) else ""
    return f"{summary['tokens_per_second']:,.0f} {summary['units']}/s{used}; time went to {shares(spent)}\n"


def _losses(summary: dict[str, Any]) -> str:
    """What the models of a finished run came to: of one peer on the internet its own, and what the others last told."""
    from farflung.report import last_told

    figure = Figure(**summary["judged_by"]) if "judged_by" in summary else LOSS._replace(unit=summary["measure"])
    own = figure.told(f"{summary[figure.key]:.4f}")
    for name, score in summary.get(figure.key_of_sources, {}).items():
        own += f", {score:.4f} of {name}"
    if summary["replicas"] == 1 and "peers" not in summary:
        return own
    if "peers" not in summary:
        averaged = f"{summary[f'{figure.key}_averaged']:.4f} with their weights averaged"
        averaged += "".join(f", {name} {value:.4f}" for name, value in summary.get("others_averaged", {}).items())
        return f"{own} (mean of the replicas), {averaged}"
    others = "".join(f"\n    {line}" for line in last_told(summary["peers"]))
    told = f"the others, with the training loss that each told last:{others}" if others else "no other peer is known"
    return f"{own} (this peer, {counted(summary['rounds'], 'round')})\n{told}"


def _report_of(folder: Path) -> str:
    """Where a finished run's report is, or why there is none."""
    from farflung.report import write_report

    if not any(re.fullmatch(r"replica-\d+", path.stem) for path in event_files(folder)):
        return "of the folders of all machines, copied together; here are only parts of replicas"
    try:
        write_report([folder], folder / "report.html")
    except OSError as error:
        return f"cannot be written: {error.strerror}; see to it, then: farflung report {shlex.quote(str(folder))}"
    return str(folder / "report.html")


def _sample_of(folder: Path, summary: dict[str, Any]) -> str:
    """What the model makes, where this process has all of it."""
    if "sample_picture" in summary:
        return f"a sample from the trained model: {folder / 'sample.png'}\n{_indented(summary['sample'])}\n\n"
    return f"a sample from the trained model:\n{_indented(summary['sample'])}\n\n" if summary["sample"] else ""


def _indented(text: str) -> str:
    printable = re.sub(r"[^\S\n]|[^\w\s!-~]", " ", text)
    return "\n".join(f"    {line}" for line in printable.splitlines())
