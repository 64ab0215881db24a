"""Old public names, which still work for one version and say what they are called now."""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from farflung.errors import UserError

K = TypeVar("K", bound=type)


def renamed(
    module: str, names: Mapping[str, str], homes: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """A module's `__getattr__`, which knows its old names; new ones may be whole paths: `farflung.errors.UserError`.

    Names that have `homes` in other modules are imported from there when they are asked for.
    """

    def find(name: str) -> Any:
        if name in homes:
            vars(sys.modules[module])[name] = found = getattr(importlib.import_module(homes[name]), name)
            return found
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        found = getattr(importlib.import_module(home or module), new)
        # `from room import Old` asks twice: once in importlib, whether there is such a name, and then for itself.
        if "importlib._bootstrap" not in sys._getframe(1).f_code.co_filename:
            _warn(f"{module}.{name}", names[name] if home else f"{module}.{new}")
        return found

    return find


class Formerly:
    """An attribute's old name: leads to the new one, and says so.

    What defines the old name only is refused by `refuse_old_names`: nothing would ask for it.

    Args:
        path: from the object to what is meant: `traits.lossless`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, thing: Any, kind: type) -> Any:
        if thing is None:
            return self
        _warn(f"{kind.__name__}.{self.name}", f"{kind.__name__}.{self.path}")
        return operator.attrgetter(self.path)(thing)

    def __set__(self, thing: Any, value: Any) -> None:
        self.refuse(type(thing))

    def refuse(self, kind: type) -> None:
        """Raises UserError: a class of somebody's says what it is by the old name."""
        raise UserError(
            f"{kind.__module__}.{kind.__qualname__} says {self.name}, which is called {self.path} now, so that nothing "
            f"would ask for it; define {self.path.partition('.')[0]} in its place"
        )


def renamed_argument(old: str, new: str) -> Callable[[K], K]:
    """For a class whose argument `new` was called `old` before."""

    def taking(kind: K) -> K:
        changed: Any = kind
        make = changed.__init__

        @functools.wraps(make)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            if old in kwargs:
                _warn(f"{kind.__name__}({old}=)", f"{kind.__name__}({new}=)")
                kwargs[new] = kwargs.pop(old)
            make(self, *args, **kwargs)

        changed.__init__ = init
        return kind

    return taking


def refuse_old_names(kind: type) -> None:
    """For `__init_subclass__`: refuses a class that defines old names without the new ones. Raises UserError."""
    for base in kind.__mro__[1:]:
        for name, old in vars(base).items():
            if isinstance(old, Formerly) and name in vars(kind) and old.path.partition(".")[0] not in vars(kind):
                old.refuse(kind)


def _warn(old: str, new: str) -> None:
    told = f"{old} is called {new} now; the old name goes with the next version"
    warnings.warn(told, DeprecationWarning, stacklevel=3)
