"""Printing to a pager or a terminal that is closed early, or into a file on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

from farflung.cli.arguments import FAILURE


@contextlib.contextmanager
def printing(program: str) -> Iterator[None]:
    """Ends a program whose output cannot be written: in silence where nobody is there to see it, else in one line."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        seen_enough = isinstance(error, BrokenPipeError)
        if not (seen_enough or _cannot_print()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still has to write at its end
        if not seen_enough and error.errno != errno.EIO:  # which a terminal gives that has been closed
            line = f"{program}: cannot print: {error.strerror}; make room, or print somewhere else"
            print(line, file=sys.stderr)
            sys.exit(FAILURE)


def _cannot_print() -> bool:
    """Whether it is what is printed that cannot be written: some more of it cannot, either."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


@contextlib.contextmanager
def working(on: str) -> Iterator[None]:
    """Shows on a terminal what is being done, as long as it is done."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # only a terminal needs it

    with Console(stderr=True).status(on):
        yield
