"""What a model makes while it trains, for whoever watches the run: text, or a picture."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from threading import Thread
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
        self._beside: list[str | Picture] | None = None
        """What is made beside training, once it is there; None where nothing is being made."""

    def due(self) -> bool:
        """Whether there is time for one, or one is there that was made beside training."""
        if self._beside is not None:
            return bool(self._beside)
        elapsed = self._clock() - self._began
        return self._share > 0 and elapsed >= FIRST_S and self._spent + self._last <= self._share * elapsed

    def sample(self, device: torch.device) -> str | Picture:
        """What the model makes, or "" where that fails. Training's random numbers stay as they are.

        Where others make it, they are asked now, and it comes with the next sample that is due.
        """
        if self._island.samples_beside:
            return self._asked()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return self._made()

    def _asked(self) -> str | Picture:
        if self._beside:
            made, self._beside = self._beside[0], None
            return made
        coming = self._beside = list[str | Picture]()
        Thread(target=lambda: coming.append(self._made()), name="a sample", daemon=True).start()
        return ""

    def _made(self) -> str | Picture:
        began = self._clock()
        try:
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
