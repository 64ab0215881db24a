"""What is common to all that hooks into a user's training loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch.utils.hooks import RemovableHandle

from farflung.networks import Group, Network

PATIENCE = 3
"""Rounds in a row that a replica may have nothing sound to offer in."""


class Diverged(RuntimeError):
    """Training has gone wrong for several rounds in a row: loss or weights are not finite."""


class Disagreement(RuntimeError):
    """The replicas do not start from the same weights."""


@dataclass(frozen=True)
class Round:
    """What happened in one round of one replica. Times are seconds on the network's clock.

    The exchange ran from `started` to `finished`; the replica stood waiting from `waited_from` to `landed`.
    `group` is empty when the replica sat out. `outcome` is one of averaged, sat out, peer lost, no progress offered,
    behind.
    `compression_error` is the part of the message, 0 to 1, that its packet left out. An adapting loop tells the
    averaged message's `effective_rank`, and what it has decided for the next round: which `share` of its first rank
    the codec may have, and `every`, the steps until then.
    """

    round: int
    fragment: int
    group: Group
    started_step: int
    step: int
    started: float
    finished: float
    waited_from: float
    landed: float
    outcome: str
    reason: str = ""
    compression_error: float = 0.0
    effective_rank: float | None = None
    share: float | None = None
    every: int | None = None


class Attached:
    """A context that does something about an inner optimizer's steps, and undoes its hooks at the end.

    Args:
        network: the replica's seat.
        deadline: the longest that a round is waited for, in seconds.
        on_round: told of every round when it has landed.
    """

    def __init__(
        self, network: Network, deadline: float = 120.0, on_round: Callable[[Round], None] | None = None
    ) -> None:
        self.network = network
        self.deadline = deadline
        self.step = 0
        self._on_round = on_round or (lambda round: None)
        self._fault = ""
        self._bad_rounds = 0
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hook is not None:
            self._hook.remove()
        if error is None:
            self.land()

    def land(self) -> None:
        """Lands what is pending."""

    def catch_up(self, wait: float) -> bool:
        """Takes the state of others before training, where it can be had within `wait` seconds; whether it was."""
        return False

    def spoil(self, reason: str) -> None:
        """Says that training went wrong since the last round: what this replica has is not for the others."""
        self._fault = self._fault or reason

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later `load_state_dict` needs to go on bit for bit."""
        return {"step": self.step, "fault": self._fault, "bad_rounds": self._bad_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.step, self._fault, self._bad_rounds = state["step"], state["fault"], state["bad_rounds"]

    def _judge(self) -> str:
        """Ends the account of a round: returns what was wrong in it, or "". Raises Diverged at the third in a row."""
        fault, self._fault = self._fault, ""
        self._bad_rounds = self._bad_rounds + 1 if fault else 0
        if self._bad_rounds >= PATIENCE:
            raise Diverged(
                f"replica {self.network.rank} had nothing sound to offer in {PATIENCE} rounds in a row; the last time: "
                f"{fault}, at step {self.step}; lower the learning rate, lengthen the warm-up, or look at the data"
            )
        return fault
