"""Hooks on a model that a copy of it, in memory or in a file, does not take along."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Unshared:
    """A hook that calls a function. Copies of the model that it hangs on have one that does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *given: Any) -> None:
        """Calls the function."""
        self._function(*given)

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        return partial, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass
