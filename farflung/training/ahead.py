"""What the process does whose forks a run's processes are: it imports what all of them need.

A module that cannot be imported is an error of those processes that need it, which import it themselves then.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
from multiprocessing import forkserver
from pathlib import Path

from farflung import scoped

TOLD = "FARFLUNG_IMPORTS_AHEAD"
"""Set in its environment: the modules, and which environment variables it is to put back."""


def _remove_socket() -> None:
    """Its launcher does, unless it was killed."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        socket = Path(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


if TOLD in os.environ:
    _modules, _before = json.loads(os.environ.pop(TOLD))
    atexit.register(_remove_socket)
    for _name in _modules:
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
    scoped.put(_before)
