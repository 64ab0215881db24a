"""What all commands share: arguments as dataclasses, and where things go that are not told where."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tyro

from farflung.errors import UserError

T = TypeVar("T")
MISUSE, FAILURE, INTERRUPTED = 2, 1, 130


def parse(kind: type[T], arguments: list[str], command: str, about: str | None, default: T | None = None) -> T:
    """Arguments as a dataclass, by tyro. Raises UserError, in one line, where tyro would print a box."""
    printed = io.StringIO()
    run: Callable[..., T] = functools.partial(
        tyro.cli,
        kind,
        args=arguments,
        prog=f"farflung {command}",
        description=about or "",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with contextlib.redirect_stderr(printed):
            return run() if default is None else run(default=default)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise UserError(_one_line(printed.getvalue(), command)) from None


def _one_line(box: str, command: str) -> str:
    """What a printed box says between its title and its next rule, with the flag that it thinks was meant.

    Where the terminal has no box-drawing characters, rules are of hyphens, and one is under the title.
    """
    lines = [re.sub(r"^│\s?|\s*│$", "", line).strip() for line in box.splitlines()[1:]]
    lines = list(itertools.dropwhile(_is_rule, lines))
    rule = next((number for number, line in enumerate(lines) if _is_rule(line)), len(lines))
    text = " ".join(line for line in lines[:rule] if line).partition(" Got errors:")[0].rstrip(".")
    text = re.sub(r"^Error parsing _?[A-Z]\w*: ", "", text)
    meant = re.search(r"Perhaps you meant:\n\s*(--[\w-]+)", "\n".join(lines))
    return f"{text}; {f'did you mean {meant[1]}?' if meant else ''} see: farflung {command} --help".replace(";  ", "; ")


def _is_rule(line: str) -> bool:
    return bool(re.fullmatch("[─╰╯-]{3,}", line))


def free_folder(name: str, mark: str = "events/*") -> Path:
    """The first runs/NAME-N that does not hold what a run leaves."""
    if "WORLD_SIZE" in os.environ:
        raise UserError("under torchrun every machine needs to know the run folder; give --out runs/NAME")
    number = 1
    while any((folder := Path("runs") / f"{name}-{number}").glob(mark)):
        number += 1
    return folder
