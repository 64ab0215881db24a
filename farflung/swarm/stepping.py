"""The ways in which a swarm's peers step, by the names that users give."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.swarm.island import Steps
from farflung.swarm.own_steps import OwnSteps
from farflung.swarm.seat import Seat
from farflung.swarm.steps_together import StepsTogether

STEPS: dict[str, Callable[[Seat, int], Steps]] = {
    "local": partial(OwnSteps, at_once=False),
    "asynchronous": partial(OwnSteps, at_once=True),
    "synchronous": StepsTogether,
}
"""Each takes a peer's seat and the run's last step."""
