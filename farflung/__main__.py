"""`python -m farflung` and `farflung` are the command line."""

import atexit
import signal

from farflung.signals import leave, stop_signals


def main() -> None:
    """Imports and runs the command line; a signal that comes before or after that ends the process at once."""
    for number in stop_signals():
        signal.signal(number, leave)
        # Last of all Python puts back the system's own handlers, which would kill a process that has done its work.
        atexit.register(signal.signal, number, signal.SIG_IGN)
    from farflung.cli import main as command

    command()


if __name__ == "__main__":
    main()
