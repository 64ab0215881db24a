"""Names that are imported when they are used: torch takes seconds, which help and mistakes should not wait for."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """Stands for a module, which is imported when something of it is first asked for."""

    _module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        """What the module has of that name."""
        if self._module is None:  # which each later time need not be looked for: steps ask thousands of times
            self._module = importlib.import_module(self.__name__)
        return getattr(self._module, name)


def homes_of(file: str) -> dict[str, str]:
    """The modules of the names that a source file imports under `if TYPE_CHECKING`, by name."""
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    checked = [one for one in body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"]
    imports = [each for one in checked for each in one.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: each.module or "" for each in imports for alias in each.names}
