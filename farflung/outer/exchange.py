"""A round's exchange: the mean of a message, column by column, and whether anchors there are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflung.networks import Finished, Group, Pending
from farflung.outer.columns import Column, Message
from farflung.outer.healing import differ
from farflung.outer.outcomes import Result
from farflung.outer.pending import Together


@dataclass
class Exchange:
    """A round's exchange under way; its start is in seconds of the network's clock."""

    started_s: float
    result: Pending[Result]
    compression_error: float = 0.0


@dataclass
class ColumnExchange:
    """What a column exchanges of a message: a pending mean, and sketches by which the group's anchors are compared."""

    column: Column
    part: Message
    mean: Pending[Tensor]
    sketches: Pending[dict[int, Tensor]] | None
    group: Group

    def done(self) -> bool:
        """See Pending."""
        return self.mean.done() and (self.sketches is None or self.sketches.done())

    @property
    def finished_at(self) -> float:
        """See Pending."""
        return self.mean.finished_at

    def wait(self, timeout: float) -> Result:
        """See Pending."""
        result = Result(self.mean.wait(timeout), self.group)
        if self.sketches is not None and differ(self.sketches.wait(timeout)):
            result.apart = (self.column.name,)
        return result


def of_columns(
    message: Message, group: Group, columns: Sequence[ColumnExchange], now: Callable[[], float]
) -> Pending[Result]:
    """The exchange of a message in a group, from those of its columns; a process that keeps no cells has none."""
    if len(columns) == 1:
        return columns[0]
    if not columns:
        return Finished(Result(message.flat, group), now())

    def joined(results: list[Result]) -> Result:
        for column in columns:
            message.put(column.part)
        return Result(message.flat, group, apart=tuple(name for result in results for name in result.apart))

    return Together(columns, now, joined)
