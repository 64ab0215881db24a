"""`python -m farflung` and `farflung` are the command line."""

import signal

from farflung.signals import leave, stop_signals


def main() -> None:
    """Imports and runs the command line; a signal that comes meanwhile, or while the process ends, ends it at once."""
    for number in stop_signals():
        signal.signal(number, leave)
    from farflung.cli import main as command

    command()


if __name__ == "__main__":
    main()
