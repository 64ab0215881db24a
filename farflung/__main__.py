"""`python -m farflung` and `farflung` are the command line."""

import atexit
import os
import signal
import sys

from farflung.signals import leave, stop_signals


def main() -> None:
    """Imports and runs the command line; a signal that comes before or after that ends the process at once."""
    for number in stop_signals():
        signal.signal(number, leave)
        # Last of all Python puts back the system's own handlers, which would kill a process that has done its work.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    _open_streams()
    from farflung.cli import main as command

    command()


def _open_streams() -> None:
    """Those that a user has closed lead nowhere; else what is opened next would take their numbers."""
    while (place := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(place, True)
    os.close(place)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main()
