"""What a model makes while it trains, for whoever watches the run: text, or a picture."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Any

import torch

from farflung.pipeline import Island
from farflung.workloads.base import Picture

FIRST_S = 20.0
"""What the first sample takes is not known before; a run that is over sooner has none."""


class Writing:
    """Has a replica make samples now and then, for a share of its time: what was spent and one more stay below that.

    Args:
        share: of the time since this was made.
        clock: seconds; the machine's own, whatever the network's is.
    """

    def __init__(self, island: Island, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._island, self._share, self._clock = island, share, clock
        self._began = clock()
        self._spent = self._last = 0.0

    def due(self) -> bool:
        """Whether there is time for one."""
        elapsed = self._clock() - self._began
        return self._share > 0 and elapsed >= FIRST_S and self._spent + self._last <= self._share * elapsed

    def sample(self, device: torch.device) -> str | Picture:
        """What the model makes now, or "" where that fails. Training's random numbers stay as they are."""
        began = self._clock()
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                return self._island.sample()
        except Exception:  # weights that are not finite have no next token; training tells of them
            return ""
        finally:
            self._last = self._clock() - began
            self._spent += self._last


def as_told(made: str | Picture) -> dict[str, Any]:
    """A sample as the events have it."""
    if isinstance(made, Picture):
        return {"text": made.caption, "picture": base64.b64encode(made.png).decode()}
    return {"text": made}
