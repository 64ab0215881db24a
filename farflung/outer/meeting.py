"""A round on an open network, before it is known who takes part."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from farflung.networks import Group, Pending


class Met(NamedTuple):
    """How a round went; `outcome` and `reason` as in Round."""

    mean: Tensor
    group: Group
    compression_error: float
    outcome: str
    reason: str


class Meeting:
    """A pending mean of those who come to a round; `met` tells more once `wait` has returned."""

    def __init__(self, pending: Pending[Met]) -> None:
        self.met: Met | None = None
        self._pending = pending

    def done(self) -> bool:
        """See Pending."""
        return self._pending.done()

    @property
    def finished_at(self) -> float:
        """See Pending."""
        return self._pending.finished_at

    def wait(self, timeout: float) -> Tensor:
        """See Pending."""
        self.met = self._pending.wait(timeout)
        return self.met.mean
