"""What other libraries and programs are told by way of this process, changed for only as long as it is needed."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping

_lock = threading.Lock()
_holders: Counter[str] = Counter()
_before: dict[str, int] = {}


@contextlib.contextmanager
def quiet(name: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Keeps another library's logger at a level meanwhile; the last of several to leave puts back what was before.

    So too those below it that have levels of their own, which do not go by its.
    """
    known = [*logging.root.manager.loggerDict]
    loggers = [logging.getLogger(name), *(logging.getLogger(one) for one in known if one.startswith(f"{name}."))]
    held = [logger for logger in loggers if logger.name == name or logger.level]
    with _lock:
        for logger in held:
            if not _holders[logger.name]:
                _before[logger.name] = logger.level
                logger.setLevel(level)
            _holders[logger.name] += 1
    try:
        yield
    finally:
        with _lock:
            for logger in held:
                _holders[logger.name] -= 1
                if not _holders[logger.name]:
                    logger.setLevel(_before.pop(logger.name))


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets environment variables meanwhile, but for those that the user has set."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def replaced(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables meanwhile, also those that the user has set; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    put(variables)
    try:
        yield
    finally:
        put(before)


def put(variables: Mapping[str, str | None]) -> None:
    """Sets environment variables for good; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
