"""Floor 6: one line in the trainers of other libraries. Each module is imported when it is used, with its library."""

from __future__ import annotations

import importlib
from types import ModuleType

from farflung.errors import UserError

NEEDS = {"transformers": "transformers accelerate", "lightning": "lightning", "accelerate": "accelerate"}
"""Each module, and what to install for it."""


def __getattr__(name: str) -> ModuleType:
    if name not in NEEDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("farflung"):
            raise
        raise UserError(f"{__name__}.{name} needs {error.name}: pip install {NEEDS[name]}") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *NEEDS})
