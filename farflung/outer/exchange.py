"""A round's exchange: the mean of a message, column by column, and whether anchors there are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from farflung.networks import Finished, Group, Network, Pending
from farflung.networks.base import fact_in, fact_packet
from farflung.outer.averaging import Averaging, Meeting
from farflung.outer.beside import Beside, Follows, SideStream
from farflung.outer.columns import Column, Message
from farflung.outer.healing import differ
from farflung.outer.outcomes import Result
from farflung.outer.pending import Together
from farflung.outer.round import PendingRound


@dataclass
class Exchange:
    """A round's exchange under way; its start is in seconds of the network's clock."""

    started_s: float
    result: Pending[Result]
    compression_error: float = 0.0


Compared = Pending[dict[int, Tensor]] | None
"""A group's sketches of an anchor, where these should be equal."""


def not_compared(column: Column, meeting: Meeting) -> None:
    """For members that all have been found to have equal anchors."""


@dataclass
class ColumnExchange:
    """What a column exchanges of a message: a pending mean, and sketches by which the group's anchors are compared."""

    column: Column
    part: Message
    mean: Pending[Tensor]
    sketches: Compared
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


def facts_of(pending: PendingRound[Tensor, Exchange], result: Result) -> dict[str, Any]:
    """What a round's exchange, and what it came to, tell of a Round."""
    return {
        "round": pending.round,
        "fragment": pending.fragment,
        "started_step": pending.started_step,
        "started": pending.exchange.started_s,
        "finished": pending.exchange.result.finished_at,
        "group": result.group,
        "outcome": result.outcome,
        "reason": result.reason,
        "compression_error": result.compression_error,
        "missing": result.missing,
    }


def weighed(meetings: Sequence[Meeting], own: float, deadline_s: float) -> list[Meeting]:
    """The meetings with what each member says that its message weighs; without, where all say the same.

    Raises PeerLostError.
    """
    told = [each.network.exchange(fact_packet(own), each.group, f"{each.key}, weights") for each in meetings]
    weights = [{rank: fact_in(word) for rank, word in each.wait(deadline_s).items()} for each in told]
    return [
        replace(meeting, weights=each if len(set(each.values())) > 1 else {})
        for meeting, each in zip(meetings, weights, strict=True)
    ]


def start_columns(
    message: Message,
    group: Group,
    columns: Sequence[Column],
    meetings: Sequence[Meeting],
    compare: Callable[[Column, Meeting], Compared],
    averaging: Averaging,
    now: Callable[[], float],
) -> tuple[Pending[Result], float]:
    """Starts comparing anchors and averaging a message, each column in its meeting.

    Returns what comes of it, and the compression error. A process that keeps no cells has no column, and waits for
    nothing.
    """
    sketches = list(map(compare, columns, meetings))
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


def started(
    start: Callable[[], tuple[Pending[Result], float]],
    message: Message,
    side: SideStream | None,
    network: Network,
    began: float,
) -> Exchange:
    """An exchange that starts now; of what a GPU has made, beside training, where a `side` is given for that."""
    if side and message.flat.is_cuda and not network.timed:
        return start_beside(start, side.following(message.flat), began, network.now)
    return Exchange(began, *start())


def start_beside(
    start: Callable[[], tuple[Pending[Result], float]], follows: Follows, began: float, now: Callable[[], float]
) -> Exchange:
    """An exchange that is started, and whose result is made, beside training."""

    def started() -> Pending[Result]:
        pending, exchange.compression_error = start()
        return pending

    beside = Beside(started, follows, now)
    exchange = Exchange(began, beside)
    beside.begin()
    return exchange
