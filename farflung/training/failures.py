"""Errors that end a run, and which of the failed processes was the first."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler

from farflung.errors import UserError
from farflung.networks import PeerLostError
from farflung.networks.torchrun import tell_launcher
from farflung.outer import DisagreementError, DivergedError
from farflung.pipeline import Mesh
from farflung.training.finish import NoRoomError
from farflung.training.stopping import StoppedError
from farflung.training.terminal import say


class RunFailedError(Exception):
    """A replica's process failed; the message says which, and why."""


RUN_ERRORS = (RunFailedError, DivergedError, DisagreementError, PeerLostError, NoRoomError)
"""An error that ends a run and is no mistake in its settings."""

NOTICED_SECONDS = 10
"""A launcher notices a death sooner. One so long after another failure is its own doing: its patience lasts longer."""


class OneLine(ErrorHandler):
    """Keeps a user's mistake, and what else is known to end runs, without the traceback that torchrun would print."""

    def record_exception(self, e: BaseException) -> None:
        """Writes the file that launchers read of a process that has failed."""
        if not isinstance(e, (UserError, StoppedError, *RUN_ERRORS)):
            super().record_exception(e)
            return
        try:
            tell_launcher(e, UserError.__name__ if isinstance(e, UserError) else "")  # of which there are kinds
        except OSError:  # a full disk hides no error
            say(str(e), urgent=True)


def failure_of(error: ChildFailedError, folder: Path, mesh: Mesh) -> Exception:
    """The error of the process that ended first; that others then lost it is no cause.

    Nor is it that the launcher then kills those that do not end. A signal to any of them stops them all, as one to
    their launcher does.
    """
    described = {rank: _describe(failure.message, failure.exitcode) for rank, failure in error.failures.items()}
    late = min(failure.timestamp for failure in error.failures.values()) + NOTICED_SECONDS
    killed = {rank for rank, f in error.failures.items() if f.exitcode == -signal.SIGKILL and f.timestamp > late}
    lost = {rank for rank, text in described.items() if text.startswith(PeerLostError.__name__)}
    causes = {rank: text for rank, text in described.items() if rank not in lost | killed} or described
    rank = min(causes, key=lambda rank: error.failures[rank].timestamp)
    kind, _, text = causes[rank].partition(": ")
    if kind == "UserError":
        return UserError(text)
    if kind == StoppedError.__name__:
        return StoppedError(text)
    who, stem = f"observer {(number := rank - mesh.processes)}", f"observer-{number}"
    if rank < mesh.processes:
        who, stem = mesh.describe(rank), mesh.file_stem(mesh.coordinates(rank))
    output = _kept(folder / "logs", rank, stem)
    return RunFailedError(f"{who} failed: {causes[rank]}; its output lies in {output}")


def _kept(logs: Path, process: int, name: str) -> Path:
    """Where a process's output lies: under a name that one can type, unless the disk is full."""
    written = sorted(logs.glob(f"*/*/attempt_*/{process}/stderr.log"), key=lambda path: path.stat().st_mtime)
    try:
        return Path(shutil.copyfile(written[-1], logs / f"{name}.log"))
    except (OSError, IndexError):
        return logs


def _describe(message: Any, exitcode: int) -> str:
    if isinstance(message, dict):
        return str(message["message"])
    return described_exit(exitcode)


def described_exit(code: int) -> str:
    """How a process has ended that says no more of it."""
    return f"it died of signal {-code}" if code < 0 else f"it ended with code {code}"
