"""A round's exchange: the mean of a message, column by column, and whether anchors there are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflung.networks import Finished, Group, Pending
from farflung.outer.averaging import Averaging, Meeting
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


def start_columns(
    message: Message,
    group: Group,
    columns: Sequence[Column],
    meetings: Sequence[Meeting],
    sketches: Sequence[Pending[dict[int, Tensor]] | None],
    averaging: Averaging,
    now: Callable[[], float],
) -> tuple[Pending[Result], float]:
    """Starts averaging a message, each column in its meeting; returns what comes of it, and the compression error.

    A process that keeps no cells has no column, and nothing to wait for.
    """
    parts = [message.part(column.cells) for column in columns]
    means, error = averaging.start_parts(parts, meetings)
    exchanges = [ColumnExchange(*one, group) for one in zip(columns, parts, means, sketches, strict=True)]
    if len(exchanges) == 1:
        return exchanges[0], error
    if not exchanges:
        return Finished(Result(message.flat, group), now()), error

    def joined(results: list[Result]) -> Result:
        for exchange in exchanges:
            message.put(exchange.part)
        return Result(message.flat, group, apart=tuple(name for result in results for name in result.apart))

    return Together(exchanges, now, joined), error
