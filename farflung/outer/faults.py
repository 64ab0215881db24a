"""Faults in a replica's training, round by round."""

from __future__ import annotations

from typing import Any

from farflung.hooks.layouts import Layout, first_told

PATIENCE_ROUNDS = 3
"""Rounds in a row without a sound message, after which training has diverged."""


class DivergedError(RuntimeError):
    """Training has gone wrong for several rounds in a row: loss or weights are not finite."""


class Faults:
    """One replica's faults: what any of its processes has found, all of them judge.

    Args:
        replica: its rank.
        layout: how it is divided.
    """

    def __init__(self, replica: int, layout: Layout) -> None:
        self._replica = replica
        self._layout = layout
        self._fault = ""
        self._bad_rounds: list[int] = []

    def spoil(self, reason: str) -> None:
        """Records that training went wrong since the last round."""
        self._fault = self._fault or reason

    def judge(self, round: int, step: int) -> str:
        """The fault since the last round, or "", which is then cleared; all of the replica's processes call it alike.

        Raises DivergedError at the third in a row.
        """
        fault, self._fault = first_told(self._layout, self._fault), ""
        if not fault:
            return ""
        if round not in self._bad_rounds:
            follows = self._bad_rounds[-1:] == [round - 1]
            self._bad_rounds = [*(self._bad_rounds if follows else []), round]
        if len(self._bad_rounds) >= PATIENCE_ROUNDS:
            raise DivergedError(
                f"replica {self._replica} had no usable weights or gradients in {PATIENCE_ROUNDS} rounds in a row; the "
                f"last time: {fault}, at step {step}; lower the learning rate, lengthen the warm-up, or check the data"
            )
        return fault

    def state_dict(self) -> dict[str, Any]:
        """The current fault and the last bad rounds."""
        return {"fault": self._fault, "bad_rounds": self._bad_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._fault, self._bad_rounds = state["fault"], list(state["bad_rounds"])
