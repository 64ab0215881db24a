"""farflung track: runs in other views than our own."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from farflung.cli.arguments import FAILURE, parse
from farflung.errors import UserError
from farflung.files import event_files, holds_no_run
from farflung.signals import on_stop_signals


@dataclass(frozen=True)
class TrackOptions:
    """Which run to hand on, and to what."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    to: str = "tensorboard"
    """tensorboard, wandb, trackio or mlflow; several with commas between them."""
    replicas: Literal["first", "all"] = "first"
    """Whose figures: the first replica's, or all, each as a run of its own in one group."""
    follow: bool = False
    """Go on as the run does, until Ctrl-C."""


def track(arguments: list[str]) -> None:
    """Hand a run's figures on to trackers: TensorBoard, Weights & Biases, Trackio, MLflow."""
    from farflung.report import trackers

    options = parse(TrackOptions, arguments, "track", track.__doc__)
    chosen = trackers.named(options.to)
    if not chosen:
        raise UserError(f"to is {options.to!r}; name at least one tracker: {', '.join(trackers.TRACKERS)}")
    launched = trackers.UNTIL_CLOSED in os.environ
    if not (launched or event_files(options.run)):
        raise UserError(holds_no_run(options.run, "there are no events in it; give a folder that farflung train made"))
    ended = threading.Event()
    if not options.follow:
        ended.set()
    if launched:
        os.nice(10)  # training goes first
        threading.Thread(target=_when_closed, args=(ended,), daemon=True).start()
    with on_stop_signals(lambda *_: ended.set()):
        told = trackers.follow(options.run, chosen, options.replicas, ended)
    for outcome in told:
        print(f"farflung: {outcome.line}", flush=True)
    trackers.leave(FAILURE if any(outcome.failed for outcome in told) else 0)


def _when_closed(ended: threading.Event) -> None:
    """Sets an event once standard input is closed."""
    sys.stdin.read()
    ended.set()
