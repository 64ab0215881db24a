"""Floor 6: the commands. They join training with the views of it, and turn errors into one line."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator

from farflung.cli.arguments import INTERRUPTED, MISUSE
from farflung.cli.peers import doctor, invite, join, status
from farflung.cli.planning import plan, simulate
from farflung.cli.runs import export, methods, report
from farflung.cli.training import train
from farflung.errors import UserError, suggestion
from farflung.formats import FORMATS, package_version
from farflung.scoped import environment

__all__ = ["main"]

COMMANDS: dict[str, Callable[[list[str]], None]] = {
    command.__name__: command
    for command in (train, invite, join, status, doctor, plan, simulate, methods, report, export)
}


def main() -> None:
    """Runs the command that the arguments name; exits with 2 after a user's mistake, without a traceback."""
    # Messages and packets are new memory each time; torch then takes it in huge pages, which costs a tenth.
    with _log_shown(), environment(THP_MEM_ALLOC_ENABLE="1"):
        _run()


def _run() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    if arguments == ["--version"]:
        print(f"farflung {package_version()}", *(f"{one.name} {one.version}" for one in FORMATS), sep="\n")
        return
    try:
        if arguments[0] not in COMMANDS:
            raise UserError(f"there is no command {arguments[0]!r}{suggestion(arguments[0], list(COMMANDS))}")
        COMMANDS[arguments[0]](arguments[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # a pager that was closed has seen enough
    except UserError as error:
        print(f"farflung: {error}", file=sys.stderr)
        sys.exit(MISUSE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


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


def _usage() -> str:
    lines = [f"  farflung {name:9} {command.__doc__}" for name, command in COMMANDS.items()]
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
