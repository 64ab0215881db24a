"""What goes wrong by a user's mistake, in one line that says what, where and what to do."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence

from safetensors import SafetensorError


class UserError(ValueError):
    """A mistake in what the user asked for: one line that says what, where and what to do."""


class LostDataError(UserError):
    """Data that was there can no longer be read; without words, it is not waited for, since the run is to stop."""


@contextlib.contextmanager
def disk_errors(what: str, remedy: str) -> Iterator[None]:
    """Says in one line what the disk does not let us do inside, and the remedy. Raises UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
        raise UserError(f"cannot {what}: {getattr(error, 'strerror', None) or error}; {remedy}") from error


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
