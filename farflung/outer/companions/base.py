"""What goes along with rounds: a method has any number of them, and a loop asks each at the same places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from farflung.cells import Cell
from farflung.outer.topologies import Topology

if TYPE_CHECKING:
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.method import Method
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync


class Along:
    """One loop's companion: does nothing, wherever it is asked."""

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """A fragment's round starts now."""

    def after(self, sync: Sync[Tensor], weights: Weights, round: int, result: Result) -> None:
        """A fragment's round, of this number, was applied."""

    def finish(self, sync: Sync[Tensor], weights: Weights) -> None:
        """What is under way is applied now, before its time, as when rounds end."""

    def hold(self, sync: Sync[Tensor], weights: Weights) -> None:
        """The state is about to be told: what is under way is waited for, and kept with the anchor."""

    def taken(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Weights and anchor are others' now: what was noted or is under way counts no more."""

    def loads(self, sync: Sync[Tensor]) -> None:
        """A state is about to be loaded, with what it has noted: what is under way counts no more."""


class Alongs(Along):
    """Several, each asked in turn."""

    def __init__(self, each: Sequence[Along]) -> None:
        self._each = each

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        for one in self._each:
            one.before(sync, weights)

    def after(self, sync: Sync[Tensor], weights: Weights, round: int, result: Result) -> None:
        """See Along."""
        for one in self._each:
            one.after(sync, weights, round, result)

    def finish(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        for one in self._each:
            one.finish(sync, weights)

    def hold(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        for one in self._each:
            one.hold(sync, weights)

    def taken(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along."""
        for one in self._each:
            one.taken(sync, weights)

    def loads(self, sync: Sync[Tensor]) -> None:
        """See Along."""
        for one in self._each:
            one.loads(sync)


@dataclass(frozen=True)
class Added:
    """What replicas average besides a round's messages, as float32.

    Args:
        values: in a round, on the mean of many.
        topology: among whom.
        hidden: whether they train meanwhile, until the next round starts.
    """

    values: float
    topology: Topology
    hidden: bool

    @property
    def nbytes(self) -> float:
        """Of a message."""
        return 4 * self.values


class Companion(Protocol):
    """A value that says what goes along with a method's rounds."""

    sends_more: bool
    """Whether replicas exchange more because of it."""

    def added(self, method: Method, cells: Sequence[Cell]) -> Added | None:
        """What they average besides their messages, for a method that keeps these cells in a process."""

    def along(self, loop: OuterLoop) -> Along:
        """What goes along with one loop's. Raises UserError where it cannot."""
