"""What --help shows of a command: the settings that matter first, or with --help-all every one in its group."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import tyro
from typing_extensions import Doc

from farflung.tables import help_of

ASKED = ("-h", "--help", "--help-all")
SAYING_NOTHING = ("None", "''", "", "False")
"""Defaults that help does not tell: what unset means, the text says."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A setting as the help shows it."""

    name: str
    hint: Any
    default: Any

    @property
    def field(self) -> tuple[str, Any, Any]:
        """As dataclasses.make_dataclass takes it."""
        plain = self.hint.__origin__ if hasattr(self.hint, "__metadata__") else self.hint
        # One that may be unset takes a value, which tyro would not show without this.
        takes_value = (tyro.conf.FlagConversionOff,) if bool in typing.get_args(plain) else ()
        hint: Any = Annotated[(self.hint, tyro.conf.arg(help_behavior_hint=_default_told), *takes_value)]
        return self.name, hint, dataclasses.field(default=self.default)


def shown(kind: type, first: Sequence[str]) -> type:
    """A command's arguments as its help shows them: all, or with `first` its own, and of its settings these."""
    if not first:
        return _readable(kind, None)
    leaves = {leaf.name: leaf for leaf in _leaves(kind)}
    own = [leaf.field for leaf in _own(kind)]
    more: Any = Annotated[bool, Doc("show all options, in groups, and exit")]
    about = {"__doc__": "The settings to begin with; --help-all shows all."}
    chosen = [leaves[name].field for name in first if name in leaves]
    common = dataclasses.make_dataclass("Common", chosen, frozen=True, namespace=about)
    fields = [_Leaf("help_all", more, False).field, *own, ("common", common, dataclasses.field(default=common()))]
    return dataclasses.make_dataclass(kind.__name__, fields, frozen=True, kw_only=True)


def names_of(kind: type) -> list[str]:
    """The settings of a command's arguments, in whatever tables."""
    return [leaf.name for leaf in _leaves(kind)]


def _default_told(default: str) -> str:
    return "" if default in SAYING_NOTHING else f"(default: {default})"


def _parts(kind: type, value: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, Any]]:
    """The fields of a dataclass, with their types and their values or defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for one in dataclasses.fields(kind):
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        yield one, hints[one.name], default if value is None else getattr(value, one.name)


def _readable(kind: type, value: Any) -> type:
    """A dataclass of arguments whose help tells no default that says nothing."""
    fields = []
    for one, hint, default in _parts(kind, value):
        if dataclasses.is_dataclass(default):
            inner: Any = _readable(type(default), default)
            hint = Annotated[(inner, *hint.__metadata__)] if hasattr(hint, "__metadata__") else inner
            fields.append((one.name, hint, dataclasses.field(default=inner())))
        else:
            fields.append(_Leaf(one.name, hint, default).field)
    about = {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True, namespace=about)


def _own(kind: type, value: Any = None) -> Iterator[_Leaf]:
    """The settings of a dataclass, without those of its tables."""
    doc = help_of(kind)
    for one, hint, default in _parts(kind, value):
        if not dataclasses.is_dataclass(default):
            told: Any = Annotated[hint, Doc(doc[one.name])] if one.name in doc else hint
            yield _Leaf(one.name, told, default)


def _leaves(kind: type, value: Any = None) -> Iterator[_Leaf]:
    """The settings of a dataclass and of its tables."""
    yield from _own(kind, value)
    for _, _, default in _parts(kind, value):
        if dataclasses.is_dataclass(default):
            yield from _leaves(type(default), default)
