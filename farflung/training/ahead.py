"""What the process does whose forks a run's processes are: it imports what all of them need.

A module that cannot be imported is an error of those processes that need it, which import it themselves then.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import TracebackType

from farflung import scoped

TOLD = "FARFLUNG_IMPORTS_AHEAD"
"""Set in its environment: the modules, which environment variables it is to put back, and its launcher's id."""
LAST_SECONDS = 10.0
"""Seconds that a launcher takes to end, at most, once it has begun to."""


def _remove_socket() -> None:
    """Its launcher does, unless it was killed."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        socket = Path(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


def _tell_unless_left(launcher: int, error: BaseException, trace: TracebackType | None) -> None:
    """Prints why a fork did not come to its program, unless its launcher ends, which takes along what forks need."""
    gone = isinstance(error, (FileNotFoundError, EOFError)) and select.select([launcher], [], [], LAST_SECONDS)[0]
    if not gone:
        sys.__excepthook__(type(error), error, trace)


if TOLD in os.environ:
    _modules, _before, _pid = json.loads(os.environ.pop(TOLD))
    atexit.register(_remove_socket)
    try:
        _launcher = os.pidfd_open(_pid)
    except ProcessLookupError:  # it has ended, and nobody else asks for forks
        _modules = []
    except (OSError, AttributeError):  # a system that has no such thing
        pass
    else:
        sys.excepthook = lambda _, error, trace: _tell_unless_left(_launcher, error, trace)
    gc.disable()  # an import makes no garbage, and looking for it takes a tenth of the time
    for _name in _modules:
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
    gc.freeze()  # forks need not look through it either, and so share its memory
    gc.enable()
    scoped.put(_before)
