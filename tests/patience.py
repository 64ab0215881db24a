"""How long tests wait: a limit only ends a hang, so it grows with how slow the machine is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from farflung.testing import waiting

SLOWER = "FARFLUNG_TESTS_SLOWER"
"""The environment variable that tells workers and child processes how many times slower this machine is."""

ROOM = 4
"""Other work may begin after the measurement."""

PROBE = "import torch; a = torch.ones(256, 256); [a @ a for _ in range(200)]; sum(range(10**6))"
PROBE_SECONDS = 1.3
"""What the probe takes on an idle core of an ordinary machine."""


def measure() -> None:
    """Finds out once a session how slow this machine is just now."""
    if SLOWER in os.environ:
        return
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", PROBE], check=True)
    os.environ[SLOWER] = str(max(1.0, (time.monotonic() - began) / PROBE_SECONDS))


def patience(seconds: float) -> float:
    """How long to wait for what takes less than `seconds` on an idle ordinary machine."""
    return ROOM * float(os.environ[SLOWER]) * seconds


def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    """Waits for something to hold."""
    waiting.until(holds, patience(seconds))
