"""What can be chosen by name: farflung's own, and what installed packages add by entry points."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from farflung.errors import UserError, suggestion

T = TypeVar("T")
log = logging.getLogger("farflung")


class Registry(Mapping[str, T]):
    """Things of one kind, such as "method", by name. A package adds some by an entry point of group `farflung.KINDs`.

    Renamed ones work under their old names for one version more, with a warning. `check` raises an error for what a
    package adds and is nothing of the kind. With `by_path`, MODULE:NAME names what a module of the user's own has.
    """

    def __init__(
        self,
        kind: str,
        rows: Mapping[str, T],
        check: Callable[[T], None],
        renamed: Mapping[str, str] | None = None,
        by_path: bool = False,
    ) -> None:
        self.kind = kind
        self._rows = dict(rows)
        self._check = check
        self._renamed = renamed or {}
        self._left_out: set[str] = set()
        self._by_path = by_path

    @functools.cached_property
    def _added(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=f"farflung.{self.kind}s"):
            if entry.name in found:
                log.warning(
                    "%s is left out: %s has that name; rename it", _named(self.kind, entry), _package(found[entry.name])
                )
            elif entry.name in self._rows or entry.name in self._renamed:
                log.warning(
                    "%s is left out: farflung has, or had, one of that name; rename it", _named(self.kind, entry)
                )
            else:
                found[entry.name] = entry
        return found

    def __getitem__(self, name: str) -> T:
        """Raises UserError for a name that there is not, and for what a package adds and cannot be used."""
        name = self.current(name)
        self.check_known(name)
        if name not in self._rows and self._is_path(name):
            return self._loaded(EntryPoint(name, name, self.kind))
        if name not in self._rows:
            self._rows[name] = self._loaded(self._added[name])
        return self._rows[name]

    def check_known(self, name: str) -> None:
        """Raises UserError for a name that there is not."""
        if name not in self and not self._is_path(name):
            raise UserError(f"there is no {self.kind} {name!r}{suggestion(name, list(self))}")
        if name not in self and not _is_import_path(name):
            told = "cannot be loaded, as it names nothing in a module; give MODULE:NAME, such as mypackage.module:Mine"
            raise UserError(f"the {self.kind} {name!r} {told}")

    def usable(self) -> Iterator[tuple[str, T]]:
        """All, farflung's own first, but for those of packages that cannot be used; each of these is told of once."""
        for name in self:
            try:
                row = self[name]
            except UserError as error:
                if name not in self._left_out:
                    log.warning("%s", error)
                self._left_out.add(name)
            else:
                yield name, row

    def described(self, name: str) -> str:
        """What to call one in a message, with its package."""
        return _named(self.kind, self._added[name]) if name in self._added else f"the {self.kind} {name!r}"

    def current(self, name: str) -> str:
        """What a name is now; warns of an old one."""
        if name not in self._renamed:
            return name
        new = self._renamed[name]
        warnings.warn(
            f"the {self.kind} {name} is called {new} now; the old name goes with the next version",
            FutureWarning,
            stacklevel=1,  # one place, so that it is told once
        )
        return new

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self._added

    def __iter__(self) -> Iterator[str]:
        return iter({**self._rows, **self._added})

    def __len__(self) -> int:
        return len({**self._rows, **self._added})

    def _is_path(self, name: str) -> bool:
        return self._by_path and ":" in name

    def _loaded(self, entry: EntryPoint) -> T:
        try:
            loaded: T = entry.load()
            self._check(loaded)
        except (Exception, SystemExit) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "repair or remove that package" if entry.dist else "repair it, or start where its module lies"
            told = f"{_named(self.kind, entry)} cannot be loaded ({why}); {remedy}"
            raise UserError(told) from error
        return loaded


def _is_import_path(path: str) -> bool:
    module, _, name = path.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name if entry.dist else entry.value}"


def _named(kind: str, entry: EntryPoint) -> str:
    return f"the {kind} {entry.name!r}" + (f" of {_package(entry)}" if entry.dist else "")
