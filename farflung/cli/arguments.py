"""What all commands share: arguments as dataclasses, and where things go that are not told where."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from typing_extensions import Doc

from farflung.cli import helping
from farflung.errors import UserError, suggestion
from farflung.tables import MayDiffer, help_of, hints_of, rule_of, tell_renamed

T = TypeVar("T")
MISUSE, FAILURE = 2, 1
LIKE_A_FILE = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
"""Flags are called as keys of a file are, without their tables, and those that are on or off take no value."""


def parse(kind: type[T], arguments: list[str], command: str, about: str | None, first: Sequence[str] = ()) -> T:
    """Arguments as a dataclass, by tyro. Raises UserError, in one line, where tyro would print a box.

    Help shows of the settings in tables those that matter `first`; --help-all shows all.
    """
    run: Callable[..., T] = functools.partial(
        tyro.cli, kind, args=arguments, prog=f"farflung {command}", description=about or "", config=LIKE_A_FILE
    )
    if asked := {*helping.ASKED} & {*arguments}:
        shown = helping.shown(kind, () if "--help-all" in asked else first)
        config = (*LIKE_A_FILE, tyro.conf.DisallowNone)
        tyro.cli(shown, args=["--help"], prog=f"farflung {command}", description=about or "", config=config)
    try:
        with _as_plain_text() as printed:
            return run()
    except SystemExit as exit:
        own = next((error for error in _causes(exit) if isinstance(error, UserError)), None)
        known = {flag(name) for name in helping.names_of(kind)}
        line = by_flags(str(own), arguments) if own else _one_line(printed.getvalue(), arguments, command, known)
        if without := re.match("(--[\\w-]+) is given without a value", line):
            line = line.replace(without[0], without[0] + _wanted(without[1], run))
        raise UserError(line) from None


def _wanted(name: str, run: Callable[..., Any]) -> str:
    """What a flag's value must be, as a part of a message, by a command's help; "" where it may be any."""
    with _as_plain_text() as printed, contextlib.suppress(SystemExit):
        run(args=["--help"])
    (kind,) = re.findall(rf" {name} (?:\{{None\}}\|)?(\S+) ", printed.getvalue())[:1] or [""]
    choices = [word for word in kind.strip("{}").split(",") if word != "None"]
    return f"; it must be {WANTED.get(kind) or ' or '.join(choices)}" if kind in WANTED or kind[:1] == "{" else ""


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


def without(table: T, names: Collection[str]) -> T:
    """Settings of which some are no flags."""
    hidden = [
        (name, Annotated[hints_of(type(table))[name], tyro.conf.Suppress], dataclasses.field(default=value))
        for name, value in vars(table).items()
        if name in names
    ]
    doc = {"__doc__": type(table).__doc__}
    kind: Any = dataclasses.make_dataclass("Without", hidden, bases=(type(table),), frozen=True, namespace=doc)
    made: T = kind(**vars(table))
    return made


def unset(tables: Iterable[type], where: MayDiffer) -> Any:
    """The settings of some tables that may differ there, as a dataclass in which none is given."""
    found: dict[str, Any] = {}
    for table in tables:
        for one in dataclasses.fields(table):
            if where in rule_of(one).may_differ:
                kind, doc = hints_of(table)[one.name], Doc(help_of(table)[one.name])
                flag = kind is bool  # which takes no value
                hint: Any = Annotated[kind if flag else kind | None, doc]
                found.setdefault(one.name, (one.name, hint, False if flag else None))
    about = {"__doc__": "What may be otherwise; unset: as before."}
    return dataclasses.make_dataclass("Unset", found.values(), frozen=True, namespace=about)()


def given(options: Any) -> dict[str, Any]:
    """What was given of a dataclass of optional settings; a flag that was not is False."""
    return {name: value for name, value in vars(options).items() if value is not None and value is not False}


@contextlib.contextmanager
def _as_plain_text() -> Iterator[io.StringIO]:
    """Yields where what is printed goes meanwhile: without colours and broken lines, whatever the terminal is."""
    printed, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield printed
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """What was being handled when an error came, from the last to the first."""
    while error := error and error.__context__:
        yield error


def by_flags(line: str, arguments: list[str]) -> str:
    """A message with settings by their flags, where they are given as such, or could be and no file is spoken of."""
    given, of_a_file = flags_among(arguments), ".toml" in " ".join([line, *arguments])

    def named(found: re.Match[str]) -> str:
        name = found[0]
        return flag(name) if flag(name) in given or ("_" in name and not of_a_file and name in _settings()) else name

    # A name of one word may be a plain word elsewhere.
    return re.sub(
        r"(?<![\w/.'-])([a-z]+(?:_[a-z]+)+(?![\w/.'-])|[a-z]+(?= is (?:['\d-]|True|False|nan|inf)))", named, line
    )


@functools.cache
def _settings() -> frozenset[str]:
    from farflung.settings import Settings  # which a command that has failed may not need

    return frozenset(Settings().flat())


WANTED = {"INT": "a whole number", "FLOAT": "a number"}
"""What a flag's value must be, by what tyro calls it."""

CALLED_ELSEWHERE = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_steps"), "steps"),
    **dict.fromkeys(("seq_len", "max_length"), "sequence_length"),
    "learning_rate": "lr",
    "output_dir": "out",
    "bs": "batch_size",
}
"""What other programs call some settings."""


def _one_line(box: str, arguments: list[str], command: str, known: Collection[str]) -> str:
    """What tyro says in a box, in our words where it is about a value."""
    lines = [line.strip() for line in box.splitlines()]
    text = "\n".join("" if re.fullmatch("-{3,}", line) else line for line in lines[2:])
    said = " ".join(text.partition("\n\n")[0].split()).rstrip(".")
    if wrong := re.search(r"^Error parsing (--[\w-]+): ", said):
        kind = re.search(rf"^{wrong[1]} (?:{{None}}\|)?(\w+)$", text, re.MULTILINE)
        wanted = f"; it must be {WANTED[kind[1]]}" if kind and kind[1] in WANTED else ""
        return f"{wrong[1]} is {value_among(arguments, wrong[1])!r}{wanted}; see: farflung {command} --help"
    if wrong := re.search(r"^invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", said):
        choices = sorted(set(re.findall("'(.*?)'", wrong[3])) - {"None"})
        return f"{wrong[2]} is {wrong[1]!r}{suggestion(wrong[1], choices)}"
    if wrong := re.search(r"^Missing value for argument '(.*)'", said):
        return f"{wrong[1]} is given without a value; see: farflung {command} --help"
    if (wrong := re.search(r"^Unrecognized options: (\S+\.toml)\b", said)) and command == "train":
        return f"{wrong[1]} comes too late: farflung train takes one config file, before all flags"
    if (strays := said.removeprefix("Unrecognized options: ").split(", ")) and (told := _unquoted(strays, arguments)):
        return told
    if missing := re.findall(r"^(\S+)[^\n]*\n[^\n]*\(required\)$", text, re.MULTILINE):
        return f"{command} needs {' and '.join(missing)}; see: farflung {command} --help"
    if unknown := flags_among(strays):
        close = re.search(r"^Perhaps you meant:\n+(--[\w-]+)", text, re.MULTILINE)
        elsewhere = {flag(theirs): flag(own) for theirs, own in CALLED_ELSEWHERE.items()}.get(unknown[0], "")
        meant = elsewhere if elsewhere in known else close[1] if close else ""
        told = f"{command} has no {unknown[0]}; {f'did you mean {meant}? ' if meant else ''}"
        return f"{told}see: farflung {command} --help"
    return f"{said}; see: farflung {command} --help"


def _unquoted(strays: list[str], arguments: list[str]) -> str:
    """What to say where the shell has made several files of a flag's pattern, of which all but one are strays."""
    if not set(strays) <= set(arguments):
        return ""
    name, *files = arguments[max(arguments.index(strays[0]) - 2, 0) :][: len(strays) + 2]
    if not name.startswith("--") or files[1:] != strays or not all(Path(file).is_file() for file in files):
        return ""
    folders, suffixes = ({getattr(Path(file), part) for file in files} for part in ("parent", "suffix"))
    alike = f"*{suffixes.pop()}" if len(suffixes) == 1 else "*"
    example = f": {name} '{folders.pop() / alike}'" if len(folders) == 1 else ""
    return f"{name} takes one path or pattern, and the shell gives {len(files)} files; quote the pattern{example}"


def free_folder(name: str, mark: str = "**/events/*") -> Path:
    """The first runs/NAME-N that does not hold what a run leaves."""
    if "WORLD_SIZE" in os.environ:
        raise UserError("under torchrun every machine needs to know the run folder; give --out runs/NAME")
    number = 1
    while any((folder := Path("runs") / f"{name}-{number}").glob(mark)):
        number += 1
    return folder
