"""farflung track and watch: runs in trackers, and on a page."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from farflung.cli.arguments import FAILURE, parse
from farflung.errors import UserError
from farflung.files import event_files, holds_no_run, runs_in, typed, written_by_farflung
from farflung.signals import on_stop_signals

if TYPE_CHECKING:
    from farflung.report.watching import Visited


@dataclass(frozen=True)
class TrackOptions:
    """Which run to hand on, and to what."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    to: str = "tensorboard"
    """tensorboard, wandb, trackio or mlflow; several with commas between them."""
    replicas: Literal["first", "all"] = "first"
    """Whose figures: the first replica's, or those of all, each as its own run in one group."""
    follow: bool = False
    """Go on as the run does, until Ctrl-C."""


def track(arguments: list[str]) -> None:
    """Hand a run's figures on to trackers: TensorBoard, Weights & Biases, Trackio, MLflow."""
    options = parse(TrackOptions, arguments, "track", track.__doc__)

    from farflung.report import trackers

    chosen = trackers.named(options.to)
    if not chosen:
        raise UserError(f"to is {options.to!r}; name at least one tracker: {', '.join(trackers.TRACKERS)}")
    launched = trackers.UNTIL_CLOSED in os.environ
    if not (launched or event_files(options.run)):
        raise UserError(holds_no_run(options.run, "there are no events in it; give a folder that farflung train made"))
    ended = threading.Event()
    if not options.follow:
        ended.set()
    elif not launched:
        print(f"farflung: handing {options.run} on to {', '.join(chosen)} as it goes on; Ctrl-C ends it", flush=True)
    if launched:
        os.nice(10)  # training goes first
        threading.Thread(target=_when_closed, args=(ended,), daemon=True).start()
    with on_stop_signals(lambda *_: ended.set()):
        told = trackers.follow(options.run, chosen, options.replicas, ended)
    for outcome in told:
        print(f"farflung: {outcome.line}", flush=True)
    trackers.leave(FAILURE if any(outcome.failed for outcome in told) else 0)


@dataclass(frozen=True)
class WatchOptions:
    """What to watch."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, folders of them, and tickets of runs on the internet."""
    port: int = 7447
    """The page's port on this machine; 0 takes a free one."""
    open: bool = False
    """Open the page in a browser."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("no run is given; give at least one folder, such as runs/noloco-1, or a ticket")


def watch(arguments: list[str]) -> None:
    """Show runs on a page in a browser on this machine, live while they train."""
    options = parse(WatchOptions, arguments, "watch", watch.__doc__)
    paths = [path for given in options.runs for path in runs_in(typed(given))]
    for path in paths:
        if not (path.is_file() or event_files(path) or written_by_farflung(path)):
            fault = "there are no events in it; give a folder that farflung train made, or a ticket"
            raise UserError(holds_no_run(path, fault) if path.exists() else f"there is no {path}; name a run folder")
    try:
        from farflung.report import watching
    except ImportError as error:
        raise UserError(
            f"the page needs {error.name}, which is not installed; install it with: pip install 'farflung[watch]'"
        ) from error
    with contextlib.ExitStack() as visits:
        watched = [
            visits.enter_context(_visited(path)) if path.is_file() else watching.Followed(path) for path in paths
        ]
        watching.serve(watched, options.port, options.open, lambda line: print(f"farflung: {line}", flush=True))


@contextlib.contextmanager
def _visited(path: Path) -> Iterator[Visited]:
    """A run of peers, to which a ticket leads. Raises UserError."""
    from farflung.networks.listening import ListenAddress
    from farflung.report.watching import Visited
    from farflung.training import onlooker, peer

    ticket = onlooker.ticket_in(path)
    settings = peer.ticket_settings(ticket).flat()
    with onlooker.looking_on(ticket, ListenAddress()) as network:
        yield Visited(ticket.name, settings, lambda: onlooker.seen(network))


def _when_closed(ended: threading.Event) -> None:
    """Sets an event once standard input is closed."""
    sys.stdin.read()
    ended.set()
