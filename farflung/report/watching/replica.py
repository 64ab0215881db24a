"""How one replica does, by what it has written last."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from farflung.events import EndEvent, EvaluationEvent, StepEvent

QUIET_S = 30.0
"""A replica that has written nothing for so long is silent, unless it usually takes longer between two lines."""
TIMES_USUAL = 5

State = Literal["trains", "begins", "silent", "dead", "died", "stopped", "finished"]
OVER = ("died", "stopped", "finished")


@dataclass
class Replica:
    """What is kept of a replica's events."""

    number: int
    step: int = 0
    """The last step that it has told of."""
    at: float = 0.0
    last: StepEvent | None = None
    evaluation: EvaluationEvent | None = None
    ended: EndEvent | None = None
    round_steps: deque[int] = field(default_factory=lambda: deque(maxlen=4))
    """The steps after which its latest rounds began."""
    gap_s: float = 0.0
    """Seconds on the network's clock between its two last lines about steps."""
    written: float = 0.0
    """When its file was written to last, as Unix time."""
    size: int = 0
    """Bytes of its file that were read."""
    process: bool | None = None
    """Whether its process is there; None where this machine has not seen it."""

    def take_step(self, event: StepEvent) -> None:
        """Keeps what it has told of a step."""
        self.gap_s = max(0.0, event.at - self.last.at) if self.last else 0.0
        self.last = event

    def look(self, file: os.stat_result, held: Mapping[int, int] | None) -> None:
        """Its file as it is; `held` are the files that processes of this machine hold: see `lock_holders`."""
        self.written, self.size = file.st_mtime, file.st_size
        if held is not None and (file.st_ino in held or self.process is not None):
            self.process = file.st_ino in held

    def quiet_s(self, now: float) -> float:
        """Seconds since it has written anything."""
        return max(0.0, now - self.written)

    def state(self, now: float, simulated: bool) -> State:
        """What it does; a simulated replica's clock is not the machine's."""
        if self.ended:
            return self.ended.reason if self.ended.reason in OVER else "stopped"  # type: ignore[return-value]
        if self.process is False:
            return "dead"
        if self.quiet_s(now) > max(QUIET_S, 0.0 if simulated else TIMES_USUAL * self.gap_s):
            return "silent"
        return "trains" if self.last else "begins"

    def late_for_round(self) -> int:
        """Steps since its last round began, where that is more than twice what it usually takes; else 0."""
        steps = list(self.round_steps)
        usual = max((later - one for one, later in pairwise(steps)), default=0)
        since = self.step - steps[-1] if steps else 0
        return since if usual and since > 2 * usual else 0
