"""Waiting for what other processes or threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(holds: Callable[[], Any], timeout_s: float, what: str = "it") -> None:
    """Waits until `holds()` is true. Raises TimeoutError after `timeout_s` seconds; `what` is the subject it names."""
    ends = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError(f"{what} never came to hold within {timeout_s:g} s")
        time.sleep(0.02)
