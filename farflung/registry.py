"""What can be chosen by name: farflung's own, and what installed packages add by entry points."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from farflung.errors import UserError, suggestion

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Things of one kind, such as "method", by name. A package adds some by an entry point of group `farflung.KINDs`.

    Renamed ones work under their old names for one version more, with a warning.
    """

    def __init__(self, kind: str, rows: Mapping[str, T], renamed: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._rows = dict(rows)
        self._renamed = renamed or {}

    @functools.cached_property
    def _added(self) -> dict[str, EntryPoint]:
        found = entry_points(group=f"farflung.{self.kind}s")
        return {entry.name: entry for entry in found if entry.name not in self._rows}

    def __getitem__(self, name: str) -> T:
        """Raises UserError for a name that there is not, and for a package that cannot be imported."""
        name = self.current(name)
        if name not in self:
            raise UserError(f"there is no {self.kind} {name!r}{suggestion(name, list(self))}")
        if name not in self._rows:
            self._rows[name] = self._loaded(self._added[name])
        return self._rows[name]

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

    def _loaded(self, entry: EntryPoint) -> T:
        try:
            loaded: T = entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise UserError(
                f"the {self.kind} {entry.name!r} of the package {package} cannot be loaded "
                f"({type(error).__name__}: {error}); repair or remove that package"
            ) from error
        return loaded
