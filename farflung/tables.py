"""Settings as frozen dataclasses: what a field says of itself, what is refused, and TOML tables of them."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import operator
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from farflung.errors import UserError, suggestion

T = TypeVar("T")


class MayDiffer(enum.Flag):
    """Where a setting may be another one than where the run was begun."""

    NOWHERE = 0
    AFTER_RESUME = enum.auto()
    BETWEEN_MACHINES = enum.auto()
    BETWEEN_PEERS = enum.auto()


NOWHERE, AFTER_RESUME = MayDiffer.NOWHERE, MayDiffer.AFTER_RESUME
BETWEEN_MACHINES, BETWEEN_PEERS = MayDiffer.BETWEEN_MACHINES, MayDiffer.BETWEEN_PEERS


@dataclass(frozen=True)
class Rule:
    """What a field says of its values: see `setting`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    may_differ: MayDiffer = NOWHERE
    formerly: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises UserError for a value outside of the limits."""
        limits = (("at least", operator.ge, self.least), ("at most", operator.le, self.most))
        beyond = (("more than", operator.gt, self.above), ("less than", operator.lt, self.below))
        for words, holds, limit in (*limits, *beyond):
            if isinstance(value, int | float) and limit is not None and not holds(value, limit):
                raise UserError(f"{name} is {value}; it must be {words} {limit:g}")


def setting(
    default: T,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    may_differ: MayDiffer = NOWHERE,
    formerly: str = "",
) -> T:
    """A `Checked` dataclass's field: its default, limits, where it may differ, its name in the version before."""
    return limited(default, Rule(least, most, above, below, may_differ, formerly))


def required(*, least: float, most: float) -> Any:
    """A `Checked` dataclass's field that has no default, and its limits."""
    return dataclasses.field(metadata={"rule": Rule(least, most)})


def limited(default: T, rule: Rule) -> T:
    """A `Checked` dataclass's field, with a rule that others go by, too."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def rule_of(field: dataclasses.Field[Any]) -> Rule:
    """What a field says of its values."""
    rule: Rule = field.metadata.get("rule", Rule())
    return rule


def new_names(kinds: Iterable[type]) -> dict[str, str]:
    """What the fields of dataclasses are called now, by the names of the version before."""
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    return {rule.formerly: field.name for field in fields if (rule := rule_of(field)).formerly}


@dataclass(frozen=True)
class Checked:
    """A dataclass that refuses values of other types than its fields', and outside of their limits."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_type(field.name, value, hints_of(type(self))[field.name])
            rule_of(field).check(field.name, value)

    def settled(self) -> Self:
        """With values for what is left to be found out. Raises UserError."""
        return self


def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    if kind not in _hints:
        _hints[kind] = typing.get_type_hints(kind)
    return _hints[kind]


_hints: dict[type, dict[str, Any]] = {}


def help_of(kind: type) -> dict[str, str]:
    """What stands below each field of a dataclass, by name."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        try:
            source = inspect.getsource(one)
        except OSError:  # the class was made while the program ran
            continue
        (definition,) = ast.parse(textwrap.dedent(source)).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def toml_table(path: Path) -> dict[str, Any]:
    """What a TOML file holds. Raises UserError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def from_table(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    """A dataclass of a TOML table; fields that are tuples of dataclasses are arrays of tables. Raises UserError."""
    known = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise UserError(f"{where}: there is no setting {key!r}{suggestion(key, list(known))}")
        values[key] = _field_of(hints_of(kind)[key], key, value, where)
    for key, field in known.items():
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if missing and key not in table:
            raise UserError(f"{where}: {key} is missing; it must be given")
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _field_of(hint: Any, key: str, value: Any, where: str) -> Any:
    """One value of a table, arrays as tuples and tables as dataclasses."""
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_table(hint, value, f"{where}, {key}")  # type: ignore[arg-type]
    if typing.get_origin(hint) is not tuple:
        try:
            _check_type(key, value, hint)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        return value
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} is {value!r}; it must be a list")
    inner = typing.get_args(hint)[0]
    if dataclasses.is_dataclass(inner) and all(isinstance(item, dict) for item in value):
        return tuple(from_table(inner, item, f"{where}, {key} {number + 1}") for number, item in enumerate(value))  # type: ignore[arg-type]
    if dataclasses.is_dataclass(inner):
        raise UserError(f"{where}: {key} must be tables, each under [[{key}]]")
    return tuple(_field_of(inner, f"{key} {number + 1}", item, where) for number, item in enumerate(value))


def flattened(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table and the tables in it hold, by key. Raises UserError for what is there twice."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        more = value if isinstance(value, dict) else {key: value}
        if twice := sorted(found.keys() & more.keys()):
            raise UserError(f"{twice[0]} is given twice; remove one of them")
        found |= more
    return found


def to_toml(values: Mapping[str, Any]) -> str:
    """Lines of TOML; values that are unset (None) are left out."""

    def text(value: Any) -> str:
        # JSON's numbers, booleans and strings are valid TOML, but for one character that only JSON leaves as it is, and
        # numbers that are not finite.
        as_json = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return str(value) if isinstance(value, float) else as_json

    written = {key: text(value) for key, value in values.items()}
    return "".join(f"{key} = {text}\n" for key, text in written.items() if values[key] is not None)


def in_toml(hint: Any) -> bool:
    """Whether values of a type can be written to TOML and read again, where None is what is unset."""
    parts = [part for part in typing.get_args(hint) if part is not Ellipsis]
    if typing.get_origin(hint) is Literal:
        return {type(part) for part in parts} <= {str, int, bool}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return all(in_toml(part) for part in parts if part is not types.NoneType)
    if typing.get_origin(hint) in (list, tuple):
        return all(in_toml(part) and types.NoneType not in typing.get_args(part) for part in parts)
    return hint in (str, int, float, bool)


def as_hinted(hint: Any, value: Any) -> Any:
    """A value as a setting's type has it: TOML has lists where a setting may have a tuple."""
    if isinstance(value, list) and typing.get_origin(hint) is tuple:
        inner = [part for part in typing.get_args(hint) if part is not Ellipsis]
        return tuple(as_hinted(inner[min(place, len(inner) - 1)], one) for place, one in enumerate(value))
    return value


def tell_renamed(old: str, new: str) -> None:
    """Says on the terminal that a setting has another name now."""
    sys.stderr.write(f"farflung: {old} is called {new} now; the old name goes with the next version\n")


def _check_type(name: str, value: object, kind: Any) -> None:
    choices = [k for k in (kind, *typing.get_args(kind)) if typing.get_origin(k) is Literal]
    if choices:
        if value is None and choices[0] is not kind:
            return
        kind = choices[0]
        if value not in typing.get_args(kind):
            raise UserError(f"{name} is {value!r}; it must be one of {', '.join(typing.get_args(kind))}")
        return
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    accepted = (*kinds, int) if float in kinds else kinds
    if type(value) not in accepted and not (isinstance(value, Path) and Path in kinds):
        wanted = " or ".join(k.__name__ for k in kinds if k is not types.NoneType)
        raise UserError(f"{name} is {value!r}; it must be of type {wanted}")
    if float in kinds and isinstance(value, float | int) and not abs(value) <= sys.float_info.max:
        raise UserError(f"{name} is {value}; it must be a finite number")
