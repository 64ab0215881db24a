"""farflung train."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TextIO

import tyro
from rich.console import Console

from farflung.cli.arguments import FAILURE, INTERRUPTED, free_folder, parse
from farflung.config import Config, Resume, read_toml
from farflung.errors import UserError
from farflung.files import holds_no_run


@dataclass(frozen=True)
class _Train:
    """What to train, or which run to go on with."""

    resume: Path | None = None
    """Go on with the run in this folder from its last whole checkpoint, with its settings."""
    restart: bool = False
    """With --resume: begin that run anew instead; its events and checkpoints are removed."""
    config: tyro.conf.OmitArgPrefixes[Config] = field(default_factory=Config)


def train(arguments: list[str]) -> None:
    """Train a model with several replicas, or go on with a run."""
    from farflung.training import launch
    from farflung.training.beginning import how_to_go_on
    from farflung.training.failures import RUN_ERRORS
    from farflung.training.stopping import StoppedError
    from farflung.training.terminal import STARTED_HERE

    config, folder, resume, restart = _train_settings(arguments)
    under_torchrun = "WORLD_SIZE" in os.environ
    shows = "LOCAL_RANK" not in os.environ or (os.environ["LOCAL_RANK"] == "0" and STARTED_HERE not in os.environ)
    try:
        if config.network == "internet":
            raise UserError(
                "a run on the internet begins with farflung invite; peers join, and come back, with farflung join"
            )
        if config.network == "simulated" and under_torchrun:
            raise UserError("network is 'simulated', which one process does alone; start it without torchrun")
        if not under_torchrun:
            launch.prepare(config, folder, resume, restart)
        if shows:
            island = f" of {config.stages} stages × {config.shard} shards" if config.stages * config.shard > 1 else ""
            what = f"{config.replicas} replicas{island}, {config.method}, {config.steps} steps"
            print(f"farflung: {what}; run folder {folder}")
        with watched(folder) if shows else contextlib.nullcontext(lambda: None) as show:
            if under_torchrun:
                tells = launch.run_torch_replica(config, folder, resume, restart, show)
                tells = tells and STARTED_HERE not in os.environ
            else:
                tells = True
                show()
                start = launch.run_simulated if config.network == "simulated" else launch.launch_torch
                start(config, folder, resume)
        if tells:
            tell_result(folder)
    except StoppedError as stopped:
        print(f"farflung: {stopped}; {how_to_go_on(folder)}", file=sys.stderr)
        sys.exit(0 if under_torchrun else INTERRUPTED)
    except RUN_ERRORS as error:
        print(f"farflung: {error}; {how_to_go_on(folder)}", file=sys.stderr)
        sys.exit(FAILURE)


def _train_settings(arguments: list[str]) -> tuple[Config, Path, bool, bool]:
    """The settings, the run folder, whether its run goes on, and whether it begins anew. Flags win over the file."""
    if "--resume" in _flags(arguments):
        _refuse_what_is_settled(arguments)
        options = parse(Resume, arguments, "train", train.__doc__)
        folder = options.resume
        if not (folder / "config.toml").exists():
            raise UserError(
                holds_no_run(folder, f"there is no config.toml to go on with; start one with --out {folder}")
            )
        config = _with_replicas(options.applied(read_toml(folder / "config.toml")))
        return config, folder, not options.restart, options.restart
    defaults = Config()
    if arguments and not arguments[0].startswith("-"):
        defaults = read_toml(Path(arguments[0]))
        arguments = arguments[1:]
    given = parse(_Train, arguments, "train", HELP, _Train(config=defaults))
    if given.restart:
        raise UserError("--restart begins a run anew that is there; say which: farflung train --resume RUN --restart")
    config = _with_replicas(given.config)
    folder = Path(config.out) if config.out else free_folder(config.method)
    return replace(config, out=str(folder)), folder, False, False


def _flags(arguments: list[str]) -> list[str]:
    """The flags among some arguments, as --every-final."""
    return [argument.partition("=")[0].replace("_", "-") for argument in arguments if argument.startswith("--")]


def _refuse_what_is_settled(arguments: list[str]) -> None:
    """Refuses settings that a run which goes on keeps. Raises UserError."""
    free, known = (["--" + one.name.replace("_", "-") for one in fields(kind)] for kind in (Resume, Config))
    settled = [flag for flag in _flags(arguments) if flag in known and flag not in free]
    if arguments[0].endswith(".toml"):
        settled.insert(0, arguments[0])
    if settled:
        raise UserError(
            f"{settled[0]} cannot go with --resume: a run that goes on keeps its settings; only "
            f"{', '.join(free[2:])} can change; for other ones, begin a run with another --out"
        )


def _with_replicas(config: Config) -> Config:
    """Under torchrun there are as many replicas as the processes that it has started make."""
    if "WORLD_SIZE" not in os.environ:
        return config
    from farflung.pipeline.layout import replicas_of

    return replace(config, replicas=replicas_of(int(os.environ["WORLD_SIZE"]), config))


@contextlib.contextmanager
def watched(folder: Path, to: TextIO | None = None) -> Iterator[Callable[[], None]]:
    """Yields what begins to show the run folder's live view, until the end: once it is known to be this run's."""
    from farflung.report import watch

    finished = threading.Event()
    view = threading.Thread(target=watch, args=(folder, finished, Console(file=to)), daemon=True)
    try:
        yield view.start
    finally:
        finished.set()
        if view.is_alive():
            view.join(timeout=10)


def tell_result(folder: Path, to: TextIO | None = None) -> None:
    """What a finished run came to, and where to read more."""
    from farflung.report import missing_from

    if not (folder / "summary.json").exists():
        return  # all replicas have died
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    sent, ddp = summary["bytes_sent"], summary["ddp_bytes"]
    without = f"{told}\n" if (told := missing_from(summary)) else ""
    fewer = f", {ddp / sent:.0f} times fewer than ddp's {ddp / 1e6:,.1f} MB" if sent and ddp else ""
    print(
        f"\nvalidation loss {summary['validation_loss']:.4f} nats a token (mean of the replicas), "
        f"{summary['validation_loss_averaged']:.4f} with their weights averaged\n"
        f"sent {sent / 1e6:,.1f} MB{fewer}\n{without}\n"
        f"the trained model writes:\n{_indented(summary['sample'])}\n\n"
        f"run folder {folder}\nreport     {_report_of(folder)}",
        file=to,
    )


def _report_of(folder: Path) -> str:
    """Where a finished run's report is, or why there is none."""
    from farflung.report import write_report

    if not any(re.fullmatch(r"replica-\d+", path.stem) for path in folder.glob("events/*.jsonl")):
        return "of the folders of all machines, copied together; here are only parts of replicas"
    try:
        write_report([folder], folder / "report.html")
    except OSError as error:
        return f"cannot be written: {error.strerror}; see to it, then: farflung report {shlex.quote(str(folder))}"
    return str(folder / "report.html")


def _indented(text: str) -> str:
    printable = re.sub(r"[^\S\n]|[^\w\s!-~]", " ", text)
    return "\n".join(f"    {line}" for line in printable.splitlines())


HELP = f"{train.__doc__}" + (
    "\n\nfarflung train [CONFIG.toml] [flags] starts a run: every flag is also a key of the file, and flags win. "
    "farflung train --resume RUN goes on with one from its last whole checkpoint, if need be with other --stages, "
    "--shard, --schedule, --microbatches, --boundary, --device and --deadline. It is refused where replicas have no "
    "checkpoint in common; with --restart, the run begins anew from its settings, and what is in the folder is lost. "
    "Under torchrun, this process becomes one of the replicas, or a part of one."
)
