"""What asks a process to end: Ctrl-C, SIGTERM, and a terminal that is closed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit code of a command that was asked to end."""

Handler = Callable[[int, FrameType | None], object]


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for an end; under nohup, closing the terminal does not."""
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


_came: list[int] = []


def came() -> bool:
    """Whether one of these signals has come to a handler of `on_stop_signals`."""
    return bool(_came)


@contextmanager
def on_stop_signals(handler: Handler) -> Iterator[None]:
    """Has a handler for the signals that ask for an end."""

    def hear(number: int, frame: FrameType | None) -> None:
        _came.append(number)
        handler(number, frame)

    before = {number: signal.signal(number, hear) for number in stop_signals()}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def leave(*_: object) -> None:
    """A handler that ends the process at once: an error that is raised within an import may come out as another."""
    os.write(2, b"farflung: stopped\n")
    os._exit(INTERRUPTED)


class Interrupted(KeyboardInterrupt):
    """A kind of its own: once a plain KeyboardInterrupt has passed an exec(), Python ends as if it had been killed."""


class Interrupt:
    """A handler that interrupts the program as Ctrl-C does, and notes that it has."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, *_: object) -> None:
        """Raises Interrupted."""
        self.came = True
        raise Interrupted
