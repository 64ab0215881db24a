"""One fragment's rounds, and what is remembered between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.networks import Finished, Group, PeerLost, Pending
from farflung.outer.adaptation import Adaptation
from farflung.outer.averaging import Averaging
from farflung.outer.fragments import Fragment
from farflung.outer.meeting import Meeting


@dataclass
class Stream:
    """A fragment, its anchor, how its messages are averaged, and when its next round starts.

    `every` and `delay` are the schedule's until adaptation changes them; `rounds` counts those that have started, and
    `trained` the inner steps since the last one.
    """

    index: int
    fragment: Fragment
    anchor: Tensor
    averaging: Averaging
    adaptation: Adaptation | None
    every: int
    delay: int
    next_start: int
    rounds: int
    trained: int = 0

    def due(self, step: int) -> bool:
        """Whether its next round starts after a step."""
        return 0 < self.next_start <= step

    def skip_to(self, step: int) -> None:
        """Leaves out the rounds before a step that a replica has missed."""
        if self.every and self.next_start < step:
            missed = -(-(step - self.next_start) // self.every)
            self.next_start += missed * self.every
            self.rounds += missed

    def state_dict(self) -> dict[str, Any]:
        """All that changes from round to round."""
        return {
            "anchor": self.anchor,
            "averaging": self.averaging.state_dict(),
            "adaptation": self.adaptation.state_dict() if self.adaptation else None,
            "every": self.every,
            "delay": self.delay,
            "next_start": self.next_start,
            "rounds": self.rounds,
            "trained": self.trained,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.anchor.copy_(state["anchor"])
        self.averaging.load_state_dict(on_device(state["averaging"], self.anchor.device))
        if self.adaptation:
            self.adaptation.load_state_dict(state["adaptation"])
        for name in ("every", "delay", "next_start", "rounds", "trained"):
            setattr(self, name, state[name])


@dataclass
class Flight:
    """A round between its start and its landing.

    `own` is a copy of the own message, and `at_start` of the weights, where the merge needs them.
    """

    fragment: int
    round: int
    group: Group
    started_step: int
    lands_at: int
    started: float
    message: Tensor
    pending: Pending[Tensor]
    own: Tensor | None
    at_start: Tensor | None
    compression_error: float
    outcome: str
    reason: str

    def wait(self, deadline: float) -> Tensor:
        """The round's mean. The policy for lost peers: what the message then holds, often this replica's own."""
        try:
            mean = self.pending.wait(deadline)
        except PeerLost as lost:
            self.outcome, self.reason = "peer lost", str(lost)
            # A copy: a peer that is only late may still be writing its values into the message.
            return self.message.clone()
        if isinstance(self.pending, Meeting) and (met := self.pending.met):
            self.group, self.compression_error = met.group, met.compression_error
            if met.outcome != "averaged" or not self.reason:
                self.outcome, self.reason = met.outcome, met.reason
        return mean

    def packed(self, mean: Tensor, now: float) -> dict[str, Any]:
        """As plain values, once the mean is there; times as ages, since clocks begin anew with a process."""
        finished = self.pending.finished_at
        self.pending = Finished(mean, finished)
        return {**vars(self), "message": mean, "started": self.started - now, "pending": finished - now}

    @classmethod
    def unpacked(cls, saved: dict[str, Any], device: torch.device, now: float) -> Flight:
        """The flight that `packed` made these values of."""
        values = on_device(saved, device)
        pending = Finished(values["message"], saved["pending"] + now)
        return cls(**{**values, "started": saved["started"] + now, "pending": pending})


def on_device(state: Any, device: torch.device) -> Any:
    """The same containers with all tensors in them on `device`."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: on_device(value, device) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(on_device(value, device) for value in state)
    return state
