"""A run's processes on this machine start at once: they are forks of one that has imported what all of them need.

A fork has memory, files, threads and signals of its own, as a process that a user starts; it shares only what was
imported, and the memory that this takes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path

from farflung import scoped
from farflung.errors import UserError
from farflung.signals import came, leave, stop_signals
from farflung.training.ahead import TOLD

FORKED = sys.platform == "linux"  # elsewhere not every library bears it
PROCESSES = multiprocessing.get_context("forkserver") if FORKED else multiprocessing.get_context("spawn")
BY_REPLICAS = (
    *("farflung.cli.training", "farflung.training.launch"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "transformers.generation"),
    "torch._dynamo",  # which torch imports at an optimizer's first step
)
BY_PEERS = (*BY_REPLICAS, "farflung.cli.peers", "farflung.training.peer")


def import_ahead(modules: Sequence[str] = BY_REPLICAS) -> ForkServerContext | SpawnContext:
    """Has what processes need imported by another one, while this one gets ready to start them; returns how to."""
    if not FORKED:
        return PROCESSES
    PROCESSES.set_forkserver_preload(["farflung.training.ahead"])
    # It finds the modules that this process would, and none that only has the name of one and lies where it is started.
    # No import takes hold of a GPU, which a fork could not use then.
    needed = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Whoever kills this process need not be told that what it has left was removed.
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"])),
    }
    told = json.dumps([[*modules], {name: os.environ.get(name) for name in needed}, os.getpid()])
    with scoped.replaced({**needed, TOLD: told}):
        resource_tracker.ensure_running()  # which lets signals through again that are blocked
        # It tells how the others have ended, so it must not end by a signal that is for all processes of a terminal;
        # and none is lost on a fork that has no handlers yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*stop_signals(), signal.SIGQUIT})
        try:
            forkserver.ensure_running()
        except OSError:  # there is no place for its socket, or too long a way to that
            return multiprocessing.get_context("spawn")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return PROCESSES


def hear_signals() -> None:
    """Lets through what was kept back from a fork until it has handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*stop_signals(), signal.SIGQUIT})


@contextmanager
def starting() -> Iterator[None]:
    """While processes are started, which do not run the program first that does: it may be a user's own.

    Raises UserError where the system lets it start no more.
    """
    program = sys.modules["__main__"]
    own, program.__spec__ = program.__spec__, find_spec("farflung.__main__")  # which multiprocessing leaves alone
    try:
        yield
    except (OSError, EOFError) as error:  # the latter where the process is gone that is forked
        remedy = "make room: memory, /dev/shm, processes (ulimit -u), open files (ulimit -n)"
        raise UserError(f"cannot start a run's processes: {error}; {remedy}") from error
    finally:
        program.__spec__ = own


@contextmanager
def none_left(timeout_s: float) -> Iterator[None]:
    """Ends the processes that were started meanwhile and are still there, however it is left."""
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        left = [process for process in multiprocessing.active_children() if process not in before]
        for process in left:
            process.terminate()
        ends = time.monotonic() + timeout_s
        for process in left:
            process.join(max(0.0, ends - time.monotonic()))
            process.kill()
            process.join()


def run_module(environment: Mapping[str, str], arguments: list[str], log: Path | None = None) -> None:
    """`python -m ARGUMENTS` in a fork. With a log, it writes there, and a terminal's signals do not reach it."""
    os.environ.update(environment)
    for number in stop_signals():
        signal.signal(number, leave)
    hear_signals()
    if log:
        os.setsid()
        place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(place, stream)
    sys.argv = arguments
    try:
        runpy.run_module(arguments[0], run_name="__main__")
    except Exception:  # which is recorded by now, or nobody's to record
        traceback.print_exc()
        sys.exit(1)
    if came() and "TORCHELASTIC_ERROR_FILE" in os.environ:
        # Too late to stop anything. torch would wait here until the launcher takes the result, and one that was asked
        # to stop takes none.
        from farflung.networks.torchrun import tell_launcher
        from farflung.training.stopping import StoppedError

        tell_launcher(StoppedError("the run had ended by then"), StoppedError.__name__)
        sys.exit(1)
