"""farflung methods, report and export: what there is, and what has come of runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from farflung.cli.arguments import parse
from farflung.cli.printing import working
from farflung.errors import UserError, counted, disk_errors
from farflung.files import runs_in, typed


@dataclass(frozen=True)
class MethodsOptions:
    """Which methods to list."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Their names; without, all."""


@dataclass(frozen=True)
class ReportOptions:
    """Which runs to report on."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The run folders, or folders of them."""
    out: Path | None = None
    """The file to write, also over an older one; unset: report.html in the run's folder, or here for several runs."""
    small: bool = False
    """Write a small report. It needs the file with plotly's program that lies beside it, so do not mail it alone."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no run folder is given; give at least one, such as runs/noloco-1")


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and where to."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder, or the ticket of a swarm: its peers then give what they have."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """The folder to write; it must not exist, or be empty."""
    best: bool = False
    """Export the checkpoint with the least validation loss, instead of what the run ended with."""
    adapter: bool = False
    """For a run with --lora: write only the adapter, as peft loads it. Without this, it is merged into the model."""
    core: bool = False
    """For a run with --core: write the core alone, as a model of its own. Without this, it is joined with the rest."""


def methods(arguments: list[str]) -> None:
    """List the methods: what each does, its paper, its bytes, its settings and their defaults."""
    wanted = parse(MethodsOptions, arguments, "methods", methods.__doc__).names

    from farflung.codecs import CODECS
    from farflung.methods import RECIPES, defaults_of
    from farflung.outer import bytes_per_parameter

    chosen = [(RECIPES.current(name), RECIPES[name]) for name in wanted] or RECIPES.usable()
    for name, recipe in chosen:
        what, _, paper = (recipe.__doc__ or "").partition("\n")
        method = recipe()
        shown = {key: value for key, value in defaults_of(name).items() if key != "seed"}
        settings = ", ".join(key if value is None else f"{key}={value}" for key, value in shown.items())
        size = f"{bytes_per_parameter(method):.3g} bytes a parameter and round: {method.codec!r}"
        size += " for what all share" if method.dealing else " and more" if method.sends_more else ""
        lines = [what, paper.strip(), size, f"settings: {settings or 'none'}"]
        print(f"{name:16} " + f"\n{'':17}".join(lines) + "\n")
    if wanted:
        return
    print("--codec takes one of these, or several joined with - (lowrank64-int4):")
    for _, row in CODECS.usable():
        print(f"{', '.join(row.examples):26} {row.travels}")


def report(arguments: list[str]) -> None:
    """Write one self-contained report.html about one run, or comparing several."""
    options = parse(ReportOptions, arguments, "report", report.__doc__)

    from farflung.report import write_report

    runs = [run for folder in options.runs for run in runs_in(typed(folder))]
    out = options.out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    with disk_errors(f"write {out}", "give another file with --out"):
        unread = write_report(runs, out, options.small)
    for line in unread:
        print(f"farflung: {line}", file=sys.stderr)
    print(f"farflung: report of {counted(len(runs), 'run')} in {out}")


def export(arguments: list[str]) -> None:
    """Write a run's averaged weights as a folder that AutoModelForCausalLM.from_pretrained loads."""
    options = parse(ExportOptions, arguments, "export", export.__doc__)

    from farflung.training.export import export as write_export

    with working("averaging the replicas' weights"):
        origin = write_export(options.run, options.folder, options.best, options.adapter, options.core)
    print(f"farflung: {options.folder} holds {origin}")
