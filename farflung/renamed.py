"""Old public names, which still work for one version and say what they are called now."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`, which knows its old names; new ones may be whole paths: `farflung.errors.UserError`."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        found = getattr(importlib.import_module(home or module), new)
        warnings.warn(
            f"{module}.{name} is called {names[name] if home else f'{module}.{new}'} now; "
            "the old name goes with the next version",
            DeprecationWarning,
            stacklevel=2,
        )
        return found

    return find
