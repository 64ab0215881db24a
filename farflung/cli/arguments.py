"""What all commands share: arguments as dataclasses, and where things go that are not told where."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from typing_extensions import Doc

from farflung.errors import UserError
from farflung.tables import MayDiffer, help_of, hints_of, rule_of, tell_renamed

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
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
    try:
        with contextlib.redirect_stderr(printed):
            return run() if default is None else run(default=default)
    except SystemExit as exit:
        if not exit.code:
            raise
        raise UserError(_one_line(printed.getvalue(), command)) from None


def flag(name: str) -> str:
    """A setting's flag."""
    return "--" + name.replace("_", "-")


def flags_among(arguments: list[str]) -> list[str]:
    """The flags among some arguments, as --every-final."""
    return [flag(argument[2:].partition("=")[0]) for argument in arguments if argument.startswith("--")]


def value_among(arguments: list[str], wanted: str) -> str | None:
    """What a flag is given among some arguments, the last time; None where it is not."""
    value = None
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        if flags_among([argument]) == [wanted]:
            _, given, own = argument.partition("=")
            value = own if given else following
    return value


def kinds_among(arguments: list[str]) -> dict[str, str]:
    """The settings that decide which others there are, as far as they are given."""
    found = {name: value_among(arguments, flag(name)) for name in ("workload", "method")}
    return {name: value for name, value in found.items() if value is not None}


def under_new_names(arguments: list[str], renamed: Mapping[str, str]) -> list[str]:
    """Arguments with flags as they are called now, by the settings' old names; tells the user of it."""
    changed = []
    for argument in arguments:
        for old, new in renamed.items():
            if flags_among([argument]) == [flag(old)]:
                tell_renamed(flag(old), flag(new))
                argument = flag(new) + argument[len(flag(old)) :]
        changed.append(argument)
    return changed


def with_field(kind: type[T], name: str, default: Any) -> type[T]:
    """A dataclass of arguments with one field more, whose default says what it is like."""
    unnamed: Any = Annotated[type(default), tyro.conf.arg(name="")]
    more = (name, unnamed, dataclasses.field(default=default))
    doc = {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(kind.__name__, [more], bases=(kind,), frozen=True, namespace=doc)


def unset(tables: Iterable[type], where: MayDiffer) -> Any:
    """The settings of some tables that may differ there, as a dataclass in which none is given."""
    found: dict[str, Any] = {}
    for table in tables:
        for one in dataclasses.fields(table):
            if where in rule_of(one).may_differ:
                hint: Any = Annotated[hints_of(table)[one.name] | None, Doc(help_of(table)[one.name])]
                found.setdefault(one.name, (one.name, hint, None))
    doc = {"__doc__": "What may be otherwise; unset: as before."}
    return dataclasses.make_dataclass("Unset", found.values(), frozen=True, namespace=doc)()


def given(options: Any) -> dict[str, Any]:
    """What was given of a dataclass of optional settings."""
    return {name: value for name, value in vars(options).items() if value is not None}


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
