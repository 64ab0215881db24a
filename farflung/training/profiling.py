"""A trace of some steps, by torch's profiler, for Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from farflung.files import beside
from farflung.training.terminal import say


class Profile:
    """Traces one process's steps, and writes the trace after the last of them.

    Args:
        steps: which steps, counted from 1; empty for none.
        path: of the trace.
    """

    def __init__(self, steps: range, path: Path) -> None:
        self._steps, self.path = steps, path
        self._tracing: Any = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A context of a step, which bears its number in the trace."""
        if number not in self._steps:
            yield
            return
        if self._tracing is None:
            self._tracing = torch.profiler.profile()
            self._tracing.start()
        with torch.profiler.record_function(f"step {number}"):
            yield

    def end(self, number: int, steps: str, warn: Callable[[str], None]) -> None:
        """Ends a step, and tells of the trace of the `steps` if it was their last; what fails ends no training."""
        try:
            if self.written(number):
                say(f"trace of steps {steps}: {self.path}; open it at ui.perfetto.dev")
        except (OSError, RuntimeError) as error:
            warn(f"no trace of steps {steps}: {error}")

    def written(self, number: int) -> bool:
        """Writes the trace, if a step was its last; whether it was. Raises OSError."""
        if self._tracing is None or number < self._steps[-1]:
            return False
        tracing, self._tracing = self._tracing, None
        tracing.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = beside(self.path)
        tracing.export_chrome_trace(str(new))
        new.rename(self.path)
        return True
