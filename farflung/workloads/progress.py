"""A terminal's bar of how much of a text has become tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from farflung.workloads.store import Told


@contextmanager
def bar(size: int | None) -> Iterator[Told]:
    """Shows on a terminal how much text, of so many bytes in all, has become how many tokens."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=size, tokens=0)
        yield lambda read, tokens: progress.update(task, completed=read, tokens=tokens)
