"""What goes wrong by a user's mistake, in one line that says what, where and what to do."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterator, Sequence


class UserError(ValueError):
    """A mistake in what the user asked for: one line that says what, where and what to do."""


class LostDataError(UserError):
    """Data that was there can no longer be read; without words, it is not waited for, since the run is to stop."""


@contextlib.contextmanager
def disk_errors(what: str, remedy: str) -> Iterator[None]:
    """Says in one line what the disk does not let us do inside, and the remedy. Raises UserError."""
    try:
        yield
    except _of_the_disk() as error:
        raise UserError(f"cannot {what}: {getattr(error, 'strerror', None) or error}; {remedy}") from error


def _of_the_disk() -> tuple[type[Exception], ...]:
    """Errors where a disk is full; safetensors has one of its own, but farflung does not need safetensors."""
    module = sys.modules.get("safetensors")
    return (OSError, module.SafetensorError) if module else (OSError,)


def counted(number: int, thing: str) -> str:
    """So many things: 1 replica, 2 replicas."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def first_of(files: Sequence[str]) -> str:
    """The first of some files, and how many more there are: a, or a and 1 other file."""
    return f"{files[0]} and {counted(len(files) - 1, 'other file')}" if files[1:] else files[0]


def suggestion(word: str, known: list[str]) -> str:
    """The words nearest to a misspelt one, as the end of an error message."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(known)}"
