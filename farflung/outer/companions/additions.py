"""What companions average besides a round's messages, on whatever network."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from farflung.networks import ElasticNetwork, Finished, Group, Party, PeerLostError
from farflung.networks.base import ALONE, fact_in, fact_packet
from farflung.outer.averaging import Averaging, Growth, Meeting
from farflung.outer.columns import Message
from farflung.outer.exchange import Exchange, not_compared, start_columns, started
from farflung.outer.outcomes import Outcome, Result
from farflung.outer.parties import average_of_party

if TYPE_CHECKING:
    from farflung.outer.loop import OuterLoop


OTHERS = "others offer what is of another kind"


@dataclass(frozen=True)
class Addition:
    """A message beside a round's.

    Args:
        message: its memory belongs to the exchange.
        group: who should average it; where replicas come and go, those do who come.
        key: the exchange's.
        round: its number.
        fragment: whose round it is.
        weight: the message's in the mean; None where all messages weigh the same, which then need not be told.
        kind: equal for all messages that may be averaged; told with the weight.
        growth: see Meeting.
        beside: what it is, where it may go on when its round is over: see Departures.
    """

    message: Message
    group: Group
    key: str
    round: int
    fragment: int
    weight: float | None = None
    kind: str = ""
    growth: Growth = 1.0
    beside: str = ""

    def alone(self, outcome: Outcome = Outcome.SAT_OUT, reason: str = "") -> Result:
        """What it comes to where nobody else takes part, or somebody is lost."""
        return Result(self.message.flat, (), outcome, reason)


def exchanged(loop: OuterLoop, added: Addition, averaging: Averaging) -> Exchange:
    """Starts averaging."""
    if elastic := loop.network.elastic:
        return _among_those_who_come(loop, elastic, added, averaging)
    try:
        return _among_all(loop, added, averaging)
    except PeerLostError as lost:
        return _over(loop, added.alone(Outcome.PEER_LOST, str(lost)))


def awaited(loop: OuterLoop, added: Addition, exchange: Exchange) -> Result:
    """What it comes to: averaged only if it is for all of the replica's processes."""
    try:
        with _watched(loop, added):
            result = exchange.result.wait(loop.deadline_s)
    except PeerLostError as lost:
        result = added.alone(Outcome.PEER_LOST, str(lost))
    told = loop.trained.layout.told((result.outcome, result.reason))
    if failed := [one for one in told if one[0] != Outcome.AVERAGED]:
        return added.alone(*failed[0])
    return result


def _over(loop: OuterLoop, result: Result) -> Exchange:
    now = loop.network.now()
    return Exchange(now, Finished(result, now))


def _among_all(loop: OuterLoop, added: Addition, averaging: Averaging) -> Exchange:
    message, group, now = added.message, added.group, loop.network.now
    columns = loop.columns.of(group, message.names)
    meetings = [Meeting(column.network, group, column.key(added.key), added.round) for column in columns]
    if added.weight is not None:
        told = [each.network.exchange(_fact(added), group, f"{each.key}, told") for each in meetings]
        with _watched(loop, added):
            words = [{rank: fact_in(word) for rank, word in one.wait(loop.deadline_s).items()} for one in told]
        if any(kind != added.kind for each in words for _, kind in each.values()):
            return _over(loop, added.alone(reason=OTHERS))
        weights = [{rank: weight for rank, (weight, _) in each.items()} for each in words]
        meetings = [
            replace(meeting, weights=each if len(set(each.values())) > 1 else {})
            for meeting, each in zip(meetings, weights, strict=True)
        ]
    start = partial(start_columns, message, group, columns, meetings, not_compared, averaging, now)
    return started(start, message, loop.side, loop.network, now())


def _watched(loop: OuterLoop, added: Addition) -> AbstractContextManager[None]:
    return loop.departures.watched(added.group, added.fragment, added.round, added.beside)


def _fact(added: Addition) -> torch.Tensor:
    return fact_packet([added.weight, added.kind])


def _among_those_who_come(loop: OuterLoop, elastic: ElasticNetwork, added: Addition, averaging: Averaging) -> Exchange:
    follows = loop.side.following(added.message.flat)

    def average(party: Party) -> Result:
        if party.behind or len(party.group) < 2:
            return added.alone(reason=OTHERS if party.behind else ALONE[party.alone])
        with torch.no_grad(), follows():
            deadline_s = loop.deadline_s
            return average_of_party(elastic, party, added.message, meeting, averaging, deadline_s)

    meeting = Meeting(loop.network, added.group, added.key, added.round, growth=added.growth)
    weight = 1.0 if added.weight is None else added.weight
    began = loop.network.now()
    return Exchange(began, elastic.meet(added.group, added.key, loop.step, weight, added.kind, average))
