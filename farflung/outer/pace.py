"""When a fragment's rounds come, and what decides it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from farflung.outer.adaptation import Adapt, Adaptation
from farflung.outer.averaging import Averaging
from farflung.outer.round import Sync


class Pace:
    """What decides when one fragment's rounds come, and how large their messages are: equal for all of a group.

    Public: `sync`, and `adaptation` where there is one.
    """

    def __init__(self, sync: Sync[Tensor], averaging: Averaging, adapt: Adapt | None) -> None:
        self.sync = sync
        self.adaptation = Adaptation(adapt) if adapt else None
        self._averaging = averaging

    def told(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "sync": self.sync.pace(),
            "adaptation": self.adaptation.state_dict() if self.adaptation else None,
            "share": self._averaging.share,
        }

    def keep(self, pace: dict[str, Any]) -> None:
        """Goes by what another replica, or an earlier run, has `told`."""
        self.sync.keep_pace(pace["sync"])
        if self.adaptation:
            self.adaptation.load_state_dict(pace["adaptation"])
        self._averaging.set_budget(pace["share"])
