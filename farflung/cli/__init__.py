"""Floor 6: the commands. They join training with the views of it, and turn errors into one line."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farflung.cli.arguments import MISUSE, by_flags
from farflung.cli.printing import printing
from farflung.errors import UserError, suggestion
from farflung.formats import FORMATS, package_version
from farflung.scoped import environment
from farflung.signals import INTERRUPTED, Interrupt, leave, on_stop_signals
from farflung.training.terminal import STARTED_HERE, leave_without_launcher, say

__all__ = ["main"]

COMMANDS = {
    "train": "farflung.cli.training",
    **dict.fromkeys(("invite", "join", "status", "doctor"), "farflung.cli.peers"),
    **dict.fromkeys(("plan", "simulate", "recommend"), "farflung.cli.planning"),
    **dict.fromkeys(("methods", "report", "export"), "farflung.cli.runs"),
    "prepare": "farflung.cli.preparing",
    "mixture": "farflung.cli.mixtures",
    **dict.fromkeys(("track", "watch"), "farflung.cli.watching"),
    "completion": "farflung.cli.completion",
}
"""The modules of the commands, which are functions of the same names; one is imported when it is run."""


def main() -> None:
    """Runs the command that the arguments name.

    Exits with 2 after a user's mistake and with 130 where it was asked to end, in one line.
    """
    interrupt = Interrupt()
    # Messages and packets are new memory each time; torch then takes it in huge pages, which costs a tenth.
    with (
        _log_shown(),
        _warnings_told(),
        _no_interrupt_lost(),
        printing("farflung"),
        environment(THP_MEM_ALLOC_ENABLE="1"),
        # What a launcher has started has nothing to clear up yet, and must not be lost in an import's bare `except`.
        on_stop_signals(leave if STARTED_HERE in os.environ else interrupt),
    ):
        leave_without_launcher()
        try:
            _run()
        except (Exception, KeyboardInterrupt) as error:
            if interrupt.came or isinstance(error, KeyboardInterrupt):  # whatever others have made of it
                print("farflung: stopped", file=sys.stderr)
                sys.exit(INTERRUPTED)
            if not isinstance(error, UserError):
                raise
            print(f"farflung: {by_flags(str(error), sys.argv[2:])}", file=sys.stderr)
            sys.exit(MISUSE)


def _run() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    if arguments == ["--version"]:
        print(f"farflung {package_version()}", *(f"{one.name} {one.version}" for one in FORMATS), sep="\n")
        return
    if arguments[0] not in COMMANDS:
        raise UserError(f"there is no command {arguments[0]!r}{suggestion(arguments[0], list(COMMANDS))}")
    if arguments[0] != "join":  # where a stranger's ticket names what to import
        sys.path.append(str(Path.cwd()))  # for a workload of the user's own
    command_named(arguments[0])(arguments[1:])


def command_named(name: str) -> Callable[[list[str]], None]:
    """The function that runs a command, from its arguments."""
    command: Callable[[list[str]], None] = getattr(importlib.import_module(COMMANDS[name]), name)
    return command


@contextlib.contextmanager
def _log_shown() -> Iterator[None]:
    """Shows what farflung logs, as lines on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("farflung: %(message)s"))
    logger = logging.getLogger("farflung")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def _warnings_told() -> Iterator[None]:
    """Tells farflung's own warnings to the user, each once, by the first of a run's processes.

    Of old names the launcher has told, which reads the same settings before that.
    """
    first = os.environ.get("RANK", "0") == "0"
    told: set[str] = set()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
            if not Path(filename).is_relative_to(Path(__file__).parents[1]):
                shown(message, category, filename, *rest)
            elif first and not (category is FutureWarning and STARTED_HERE in os.environ) and str(message) not in told:
                told.add(str(message))
                say(str(message))

        warnings.showwarning = show  # type: ignore[assignment]
        yield


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Sends an interrupt again that has fallen into a destructor, out of which Python lets no error."""
    shown = sys.unraisablehook

    def hook(told: Any) -> None:
        if issubclass(told.exc_type, KeyboardInterrupt):
            threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        else:
            shown(told)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = shown


def _usage() -> str:
    lines = [f"  farflung {name:10} {command_named(name).__doc__}" for name in COMMANDS]
    return "\n".join(
        [
            "Train one model on machines that are far apart.",
            "",
            *lines,
            "",
            "More on one: farflung COMMAND --help",
            "Versions: farflung --version",
        ]
    )
