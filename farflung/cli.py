"""Floor 6: the commands. They join training with the views of it, and turn errors into one line."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import tyro

from farflung.config import Config, Resume, UserError, read_toml, suggestion

T = TypeVar("T")
MISUSE, FAILURE, INTERRUPTED = 2, 1, 130


def main() -> None:
    """Runs the command that the arguments name; exits with 2 after a user's mistake, without a traceback."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    try:
        if arguments[0] not in COMMANDS:
            raise UserError(f"there is no command {arguments[0]!r}{suggestion(arguments[0], list(COMMANDS))}")
        COMMANDS[arguments[0]](arguments[1:])
    except UserError as error:
        print(f"farflung: {error}", file=sys.stderr)
        sys.exit(MISUSE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def train(arguments: list[str]) -> None:
    """Train a model with several replicas, or go on with a run."""
    from farflung.training import launch
    from farflung.training.stopping import Stopped

    config, folder, resume = _train_settings(arguments)
    start = _start_of(config)
    shows = "LOCAL_RANK" not in os.environ or (
        os.environ["LOCAL_RANK"] == "0" and launch.STARTED_HERE not in os.environ
    )
    try:
        if start is not launch.run_torch_replica:
            launch.prepare(config, folder, resume)
        if shows:
            island = f" of {config.stages} stages × {config.shard} shards" if config.stages * config.shard > 1 else ""
            what = f"{config.replicas} replicas{island}, {config.method}, {config.steps} steps"
            print(f"farflung: {what}; run folder {folder}")
        with _watched(folder) if shows else contextlib.nullcontext():
            start(config, folder, resume)
        if shows:
            _tell_result(folder)
    except Stopped as stopped:
        print(f"farflung: {stopped}; go on with: farflung train --resume {folder}", file=sys.stderr)
        sys.exit(0 if start is launch.run_torch_replica else INTERRUPTED)
    except launch.RUN_ERRORS as error:
        print(f"farflung: {error}; go on with: farflung train --resume {folder}", file=sys.stderr)
        sys.exit(FAILURE)


def methods(arguments: list[str]) -> None:
    """List the methods: what each does, its paper, its bytes, its settings and their defaults."""
    from farflung.codecs import CODEC_NAMES
    from farflung.methods import RECIPES, bytes_per_parameter, settings_of

    _parse(_NoArguments, arguments, "methods")
    for name, recipe in RECIPES.items():
        what, _, paper = (recipe.__doc__ or "").partition("\n")
        method = recipe()
        shown = {key: value for key, value in settings_of(name).items() if key != "seed" and value is not None}
        settings = ", ".join(f"{key}={value}" for key, value in shown.items())
        size = f"{bytes_per_parameter(method):.3g} bytes a parameter and round: {method.codec!r}"
        lines = [what, paper.strip(), size, f"settings: {settings or 'none'}"]
        print(f"{name:16} " + f"\n{'':17}".join(lines) + "\n")
    print(f"--codec takes: {CODEC_NAMES}")


def report(arguments: list[str]) -> None:
    """Write one self-contained report.html about one run, or comparing several."""
    from farflung.report import write_report

    options = _parse(_ReportOptions, arguments, "report")
    out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    write_report(list(options.runs), out)
    print(f"farflung: report of {len(options.runs)} run(s) in {out}")


def export(arguments: list[str]) -> None:
    """Write a run's averaged weights as a folder that AutoModelForCausalLM.from_pretrained loads."""
    from farflung.training.export import export as write_export

    options = _parse(_ExportOptions, arguments, "export")
    origin = write_export(options.run, options.folder)
    print(f"farflung: {options.folder} holds {origin}")


def simulate(arguments: list[str]) -> None:
    """Show what rounds would cost for up to thousands of replicas, under given conditions; trains nothing."""
    from farflung.planner.page import write_simulation
    from farflung.planner.simulation import SimulateOptions, table_of, write_events
    from farflung.planner.simulation import simulate as time_methods

    options = _parse(SimulateOptions, arguments, "simulate")
    results = time_methods(options)
    size = f"{options.params:.3g} parameters" if options.params else options.model
    described = f"{options.replicas} replicas of {size}, {options.rounds} rounds, conditions {options.conditions}"
    print(f"farflung: {described}\n\n{table_of(results).text()}\n")
    folder = options.out or _free_folder("simulation", "simulation.html")
    write_events(results, folder / "events")
    write_simulation(results, described, folder / "simulation.html")
    print(f"farflung: pictures in {folder / 'simulation.html'}, each round in {folder / 'events'}")


def plan(arguments: list[str]) -> None:
    """Show what training would cost on given machines, method by method and layout by layout; trains nothing."""
    from farflung.planner.plan import PlanOptions, reasons, shown, table_of, where
    from farflung.planner.plan import plan as make_plans

    options = _parse(PlanOptions, arguments, "plan")
    plans, failures, cluster = make_plans(options)
    print(f"farflung: {options.model}, {options.tokens:.3g} tokens, {len(cluster.workers)} workers\n")
    print(table_of(shown(plans, options.show), cluster.currency).text())
    best = plans[0]
    if best.placed:
        print("\n* stages placed on the links that suit them; the best:")
        print("\n".join(f"  {line}" for line in where(best, cluster)))
    if failures:
        lines = reasons(failures)
        print("\nthese cannot be:")
        print("\n".join(f"  {line}" for line in lines[: options.show]))
        if len(lines) > options.show:
            print(f"  and {len(lines) - options.show} more; see them with --show {len(lines)}")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    command.__name__: command for command in (train, plan, simulate, methods, report, export)
}


@dataclass(frozen=True)
class _NoArguments:
    """No arguments."""


@dataclass(frozen=True)
class _ReportOptions:
    """Which runs to report on."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """The run folders."""
    out: Path | None = None
    """The file to write; unset: report.html in the run's folder, or here for several runs."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no run folder is given; give at least one, such as runs/noloco-1")


@dataclass(frozen=True)
class _ExportOptions:
    """What to export, and where to."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    folder: tyro.conf.Positional[Path]
    """The folder to write; it must not exist, or be empty."""


def _train_settings(arguments: list[str]) -> tuple[Config, Path, bool]:
    """The settings, the run folder, and whether its run goes on. Flags win over the file."""
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        options = _parse(Resume, arguments, "train")
        folder = options.resume
        if not (folder / "config.toml").exists():
            raise UserError(
                f"{folder} holds no run to go on with: there is no config.toml; start one with --out {folder}"
            )
        return _with_replicas(options.applied(read_toml(folder / "config.toml"))), folder, True
    defaults = Config()
    if arguments and not arguments[0].startswith("-"):
        defaults = read_toml(Path(arguments[0]))
        arguments = arguments[1:]
    config = _with_replicas(_parse(Config, arguments, "train", defaults))
    folder = Path(config.out) if config.out else _free_folder(config.method)
    started_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return replace(config, out=str(folder)), folder, started_again


def _with_replicas(config: Config) -> Config:
    """Under torchrun there are as many replicas as the processes that it has started make."""
    if "WORLD_SIZE" not in os.environ:
        return config
    from farflung.pipeline.layout import replicas_of

    return replace(config, replicas=replicas_of(int(os.environ["WORLD_SIZE"]), config))


def _free_folder(name: str, mark: str = "events/*") -> Path:
    """The first runs/NAME-N that does not hold what a run leaves."""
    if "WORLD_SIZE" in os.environ:
        raise UserError("under torchrun every machine needs to know the run folder; give --out runs/NAME")
    number = 1
    while any((folder := Path("runs") / f"{name}-{number}").glob(mark)):
        number += 1
    return folder


def _start_of(config: Config) -> Callable[[Config, Path, bool], None]:
    from farflung.training import launch

    if "WORLD_SIZE" in os.environ:
        return launch.run_torch_replica
    return launch.run_simulated if config.network == "simulated" else launch.launch_torch


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[None]:
    """Shows the run folder's live view meanwhile."""
    from farflung.report import watch

    finished = threading.Event()
    view = threading.Thread(target=watch, args=(folder, finished), daemon=True)
    view.start()
    try:
        yield
    finally:
        finished.set()
        view.join(timeout=10)


def _tell_result(folder: Path) -> None:
    """What a finished run came to, and where to read more."""
    from farflung.report import read_run, write_report

    write_report([folder], folder / "report.html")
    summary = read_run(folder).summary
    if summary is None:
        return
    sent, ddp = summary["bytes_sent"], summary["ddp_bytes"]
    fewer = f", {ddp / sent:.0f} times fewer than ddp's {ddp / 1e6:,.1f} MB" if sent else ""
    print(
        f"\nvalidation loss {summary['validation_loss']:.4f} nats a token (mean of the replicas), "
        f"{summary['validation_loss_averaged']:.4f} with their weights averaged\n"
        f"sent {sent / 1e6:,.1f} MB{fewer}\n\n"
        f"the trained model writes:\n{_indented(summary['sample'])}\n\n"
        f"run folder {folder}\nreport     {folder / 'report.html'}"
    )


def _indented(text: str) -> str:
    printable = re.sub(r"[^\S\n]|[^\w\s!-~]", " ", text)
    return "\n".join(f"    {line}" for line in printable.splitlines())


def _parse(kind: type[T], arguments: list[str], command: str, default: T | None = None) -> T:
    """Arguments as a dataclass, by tyro. Raises UserError, in one line, where tyro would print a box."""
    printed = io.StringIO()
    parse: Callable[..., T] = functools.partial(
        tyro.cli,
        kind,
        args=arguments,
        prog=f"farflung {command}",
        description=(COMMANDS[command].__doc__ or "") + (_TRAIN_HELP if command == "train" else ""),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with contextlib.redirect_stderr(printed):
            return parse() if default is None else parse(default=default)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise UserError(_one_line(printed.getvalue(), command)) from None


def _one_line(box: str, command: str) -> str:
    """What a printed box says up to its first rule, with the flag that it thinks was meant."""
    lines = [re.sub(r"^│\s?|\s*│$", "", line).strip() for line in box.splitlines()[1:]]
    rule = next((number for number, line in enumerate(lines) if re.match("[─╰]{3}", line)), len(lines))
    text = " ".join(line for line in lines[:rule] if line).partition(" Got errors:")[0].rstrip(".")
    text = re.sub(r"^Error parsing _?[A-Z]\w*: ", "", text)
    meant = re.search(r"Perhaps you meant:\n\s*(--[\w-]+)", "\n".join(lines))
    return f"{text}; {f'did you mean {meant[1]}?' if meant else ''} see: farflung {command} --help".replace(";  ", "; ")


def _usage() -> str:
    lines = [f"  farflung {name:9} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["Train one model on machines that are far apart.", "", *lines, "", "More on one: farflung COMMAND --help"]
    )


_TRAIN_HELP = (
    "\n\nfarflung train [CONFIG.toml] [flags] starts a run: every flag is also a key of the file, and flags win. "
    "farflung train --resume RUN goes on with one from its last whole checkpoint, if need be with other --stages, "
    "--shard, --schedule, --microbatches, --boundary, --device and --deadline. "
    "Under torchrun, this process becomes one of the replicas, or a part of one."
)
