"""One replica's rounds as a machine, with neither a network nor a clock in it.

After each inner step it says which rounds are due and which start. `offer` makes a round's message, `absorb` makes new
weights of the group's mean; what happens between is a driver's affair. What a fragment holds is its weights
(fragments.py), or only their size, where a driver looks at nothing but time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from farflung.networks import Group
from farflung.outer.schedules import Schedule
from farflung.outer.topologies import Topology, group_of

M = TypeVar("M")
"""A message: a flat tensor, or a number of bytes."""
E = TypeVar("E")
"""A driver's own handle of an exchange under way."""


@dataclass(eq=False)
class Offer(Generic[M]):
    """A replica's message in a round, and what its merge needs when the round is applied.

    Args:
        message: its memory belongs to the exchange once that has started.
        fault: why it holds no progress, or "".
        anchor: a copy of the anchor that it was made with.
        applied: what part of it the anchor has been moved by already, before any exchange.
        own: a copy of the message.
        at_start: a copy of the weights at the round's start.
    """

    message: M
    fault: str = ""
    anchor: M | None = None
    applied: float = 0.0
    own: M | None = None
    at_start: M | None = None


class Content(Protocol[M]):
    """What a fragment's rounds exchange."""

    def offer(self, fault: str) -> Offer[M]:
        """The message: the progress since the last round; none with a fault."""

    def keep(self, offer: Offer[M], delayed: bool) -> None:
        """Keeps what is needed when the round is applied, some steps later if `delayed`."""

    def step_alone(self, offer: Offer[M], members: int) -> None:
        """If the merge is eager: steps with this replica's part of the mean of so many members, before any exchange."""

    def absorb(self, offer: Offer[M], mean: M, fresh: Offer[M] | None, delayed: bool) -> bool:
        """Makes new weights of a mean, whose memory is used up; whether the mean was of any use.

        `fresh` is what the next round will offer, where that starts at once and the merge has made it already.
        """


@dataclass(eq=False)
class PendingRound(Generic[M, E]):
    """A round of one fragment that has started and is not applied yet; both moments are inner steps."""

    fragment: int
    round: int
    group: Group
    started_step: int
    lands_at_step: int
    offer: Offer[M]
    exchange: E

    @property
    def delayed(self) -> bool:
        """Whether steps are trained meanwhile."""
        return self.lands_at_step > self.started_step


class Sync(Generic[M]):
    """One fragment's rounds: when each starts, with whom, and with which message.

    Public: `every_steps` and `delay_steps` are the schedule's, until adaptation changes them; `next_start` is a step;
    `rounds` counts those that have started, `trained` the inner steps behind the next message, and `offered` those
    behind the last one. `met` is the last round's group, and `lost` says that a round was lost since anchors were last
    known to be equal.
    """

    def __init__(self, index: int, schedule: Schedule, content: Content[M]) -> None:
        self.index = index
        self.content = content
        self.every_steps = schedule.every or 0
        self.delay_steps = schedule.delay
        self.next_start = self._first = schedule.first(index % schedule.fragments)
        self.rounds = self.next_start // (self.every_steps or 1)
        self.trained, self.offered = 0, 0
        self.met: Group = ()
        self.lost = False
        self._schedule = schedule
        self.fresh: Offer[M] | None = None

    def group(self, rank: int, members: Group, topology: Topology) -> Group:
        """With whom a replica averages in its next round; nobody when it sits out."""
        return group_of(rank, topology.groups(members, self.label))

    @property
    def label(self) -> str:
        """The next round's, by which groups are drawn."""
        return f"round {self.rounds} of fragment {self.index}"

    def starts_at(self, step: int) -> bool:
        """Whether its next round starts after a step."""
        return 0 < self.next_start <= step

    def offer(self, fault: Callable[[], str], members: int) -> Offer[M]:
        """What to say in the next round, in a group of so many; `fault` tells why it holds no progress.

        It may have been made just before, when the last round was applied, with the fault of then.
        """
        offer, self.fresh = self.fresh or self.content.offer(fault()), None
        self.content.keep(offer, self.delay_steps > 0)
        if members and not offer.applied:
            self.content.step_alone(offer, members)
        return offer

    def offer_before_applying(self, fault: str, members: int) -> None:
        """Makes the next round's offer before the last round is applied, as an eager merge needs it."""
        self.fresh = self.content.offer(fault)
        self.fresh.applied = 1 / members

    def start(self, step: int, group: Group, offer: Offer[M], exchange: E) -> PendingRound[M, E]:
        """The next round, whose exchange is under way; on to the one after it."""
        number, lands_at_step = self.rounds, step + self.delay_steps
        self.offered, self.trained, self.met = self.trained, 0, group
        self.rounds += 1
        if self._schedule.final is not None:
            self.every_steps = self._schedule.every_at(step)
        self.next_start += self.every_steps
        lands_at_step = min(lands_at_step, self.next_start)  # one that starts late, after an interrupt, say
        return PendingRound(self.index, number, group, step, lands_at_step, offer, exchange)

    def absorb(self, pending: PendingRound[M, E], mean: M) -> bool:
        """Makes new weights of a round's mean, whose memory is used up; whether it was of any use."""
        return self.content.absorb(pending.offer, mean, self.fresh, pending.delayed)

    def ended(self, pending: PendingRound[M, E], met: bool, lost: bool) -> None:
        """A round that was `lost`, or not, is over; where nobody was `met`, the next message holds these steps, too."""
        self.lost |= lost
        if not (met or pending.offer.applied or pending.offer.fault):
            self.trained += self.offered

    def shorten(self, share: float) -> None:
        """Has its rounds, and the delay, take a share of the schedule's steps."""
        self.every_steps, self.delay_steps = self._schedule.shortened(share)

    def stop(self) -> None:
        """Starts no more rounds."""
        self.next_start = 0

    def skip_to(self, step: int) -> None:
        """Leaves out the rounds before a step that a replica has missed."""
        if self.every_steps and self.next_start < step:
            missed = -(-(step - self.next_start) // self.every_steps)
            self.next_start += missed * self.every_steps
            self.rounds += missed

    def holds_from(self, step: int, told: int) -> bool:
        """Whether its first round from a step on starts with what others had before the rounds of the step `told`.

        It does when the round before that had landed then.
        """
        missed = max(0, -(-(step - self.next_start) // self.every_steps))
        last = self.next_start + (missed - 1) * self.every_steps
        return last < self._first or last + self.delay_steps < told

    def pace(self) -> dict[str, int]:
        """When rounds come: what members of one group must have alike."""
        return {"every_steps": self.every_steps, "delay_steps": self.delay_steps, "next_start": self.next_start}

    def keep_pace(self, pace: dict[str, int]) -> None:
        """Goes by another replica's `pace`."""
        self.every_steps, self.delay_steps = pace["every_steps"], pace["delay_steps"]
        self.next_start = pace["next_start"]

    def state_dict(self) -> dict[str, Any]:
        """All that changes from round to round, but what it is about."""
        return {
            **self.pace(),
            **{name: getattr(self, name) for name in ("rounds", "trained", "offered", "met", "lost")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.keep_pace(state)
        self.rounds, self.trained = state["rounds"], state["trained"]
        self.met, self.lost = tuple(state["met"]), state["lost"]
        self.offered = state.get("offered", 0)  # earlier releases kept none


class Rounds(Generic[M, E]):
    """All rounds of one replica: of each fragment there is a content, and a schedule."""

    def __init__(self, schedules: Sequence[Schedule], contents: Sequence[Content[M]]) -> None:
        self.syncs = [Sync(index, *one) for index, one in enumerate(zip(schedules, contents, strict=True))]
        self.pending: list[PendingRound[M, E]] = []

    def after(self, step: int) -> Iterator[Sync[M] | PendingRound[M, E]]:
        """What to do after a step: apply rounds that are due, start rounds, apply those that are due at once."""
        yield from self._due(step)
        for sync in self.syncs:
            sync.trained += 1
            if 0 < sync.next_start <= step:
                yield sync
            else:
                sync.fresh = None  # an offer that was made when a round was applied, where no next one has started
        yield from self._due(step)

    def _due(self, step: int) -> Iterator[PendingRound[M, E]]:
        for pending in tuple(self.pending):
            if pending.lands_at_step <= step:
                self.pending.remove(pending)
                yield pending

    def next_step(self) -> int:
        """The next step after which there is something to do; 0 for never."""
        first = 0
        for pending in self.pending:
            if not 0 < first < pending.lands_at_step:
                first = pending.lands_at_step
        for sync in self.syncs:
            if sync.next_start and not 0 < first < sync.next_start:
                first = sync.next_start
        return first
