"""Exchanges of simulated replicas: who has come, what is under way, and who is missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from farflung.errors import UserError
from farflung.networks.base import Group
from farflung.networks.simulator.clock import Clock
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.fabric import Carrier, Demand
from farflung.networks.simulator.flows import Flow

Hops = Callable[[dict[int, Any]], Iterator[Demand]]
"""Given what each member has brought: what is sent, hop after hop; each begins when the one before has arrived."""


Side = tuple[int, ...]
"""The cuts that a replica is behind, by number; () for those whom no cut concerns."""

DIED, LEFT, CUT_OFF = "has died", "has left the run", "is cut off"
MEETS_OTHERS = "meets others, since the members have changed"


def on_another_side(rank: int, group: Group, sides: Mapping[int, Side]) -> list[int]:
    """The members of a group that a replica cannot reach."""
    return [other for other in group if sides.get(other, ()) != sides.get(rank, ())] if sides else []


def described(lost: dict[int, str]) -> str:
    """What has become of some replicas, those of one fate together."""
    fates = {why: [str(rank) for rank in sorted(lost) if lost[rank] == why] for why in dict.fromkeys(lost.values())}
    return "; ".join(f"replica {', '.join(ranks)} (simulated) {why}" for why, ranks in fates.items())


class Meeting:
    """One exchange. Bytes begin to flow when all members have come.

    `ended_at` is when it ended well, `lost` are the members for whose sake it never will: they had not come, or died.
    """

    def __init__(self, group: Group, key: str) -> None:
        self.group = group
        self.key = key
        self.brought: dict[int, Any] = {}
        self.ended_at = math.inf
        self.lost: tuple[int, ...] = ()
        self._why: dict[int, str] = {}
        self._sides: Mapping[int, Side] = {}
        self.under_way: Iterator[Demand] | None = None
        self.flow: Flow | None = None
        self.limit = math.inf
        self.hop = 0
        self.waiting: list[Callable[[], None]] = []

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen in it."""
        return bool(self.lost) or self.ended_at < math.inf

    def missing(self) -> tuple[int, ...]:
        """Who has not come."""
        return tuple(rank for rank in self.group if rank not in self.brought)

    def lost_to(self, rank: int) -> dict[int, str]:
        """Whom a member could not meet in one that was given up, and why: never itself, even where it came too late."""
        cut_off = dict.fromkeys(on_another_side(rank, self.group, self._sides), CUT_OFF)
        away = cut_off | {other: why for other, why in self._why.items() if other != rank}
        others = [other for other in self.lost if other != rank] or [other for other in self.group if other != rank]
        return away or dict.fromkeys(others, MEETS_OTHERS)

    def give_up(self, lost: Iterable[int], why: dict[int, str], sides: Mapping[int, Side]) -> None:
        """Ends it without a result, and tells those who wait.

        Args:
            lost: the members that had not come, or have died.
            why: what is known of some.
            sides: of those who are cut off at this moment.
        """
        self.lost, self._why, self._sides = tuple(sorted(lost)), why, sides
        self._tell()

    def settle(self, ended_at: float) -> None:
        """Ends it well, and tells those who wait."""
        self.ended_at = ended_at
        self._tell()

    def _tell(self) -> None:
        waiting, self.waiting = self.waiting, []
        for tell in waiting:
            tell()


class World:
    """The replicas' clock and links, who is there, and their meetings.

    Args:
        replicas: how many.
        conditions: what their world is like.
    """

    def __init__(self, replicas: int, conditions: Conditions) -> None:
        self.clock = Clock()
        self.conditions = conditions
        self.carrier = Carrier(self.clock, conditions, replicas)
        self._everyone = tuple(range(replicas))
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        self._side: dict[int, Side] = {}
        self._members: dict[Side, Group] = {(): self._everyone}
        self._gathering: dict[str, list[Meeting]] = {}
        self._faulty = bool(conditions.cuts or conditions.deaths)
        self._came: set[tuple[str, int]] = set()
        self._expected: dict[tuple[str, int], list[Meeting]] = {}
        self._under_way: dict[Meeting, None] = {}
        self.when_dead: Callable[[int], None] = lambda rank: None
        self._ask_for_faults()

    def members(self, rank: int) -> Group:
        """The living whom a replica can reach, itself among them. Those whose work is done count as living."""
        return self._members[self._side.get(rank, ())]

    @property
    def living(self) -> Group:
        """All that have not died, wherever they are."""
        return tuple(rank for rank in self._everyone if rank not in self._dead)

    def meet(self, rank: int, group: Group, key: str, brings: Any, hops: Hops) -> Meeting:
        """A replica comes to a meeting, which is made by whoever comes first."""
        # By first member: hashing a group of thousands for each of them would take most of the time.
        place = f"{key}, {group[0]}"
        gathering = self._gathering.setdefault(place, [])
        meeting = next((known for known in gathering if known.group is group or known.group == group), None)
        if meeting is None:
            meeting = Meeting(group, key)
            gathering.append(meeting)
            if self._faulty:
                self._expect(meeting)
        meeting.brought[rank] = brings
        if self._faulty:
            self._note(rank, meeting)
        if len(meeting.brought) == len(group) and not meeting.settled:
            gathering.remove(meeting)
            if not gathering:
                del self._gathering[place]
            self._under_way[meeting] = None
            meeting.under_way = hops(meeting.brought)
            self._next_hop(meeting)
        elif self._gone:
            gone = [one for one in meeting.missing() if one in self._gone]
            self._give_up_on(meeting, gone, {one: DIED if one in self._dead else LEFT for one in gone})
        return meeting

    def _expect(self, meeting: Meeting) -> None:
        """Nobody comes twice under one key: who has come to another group's meeting is lost to this one."""
        elsewhere = {rank for rank in meeting.group if (meeting.key, rank) in self._came}
        self._give_up_on(meeting, elsewhere, dict.fromkeys(elsewhere, MEETS_OTHERS))
        for rank in meeting.group:
            if rank not in elsewhere:
                self._expected.setdefault((meeting.key, rank), []).append(meeting)

    def _note(self, rank: int, meeting: Meeting) -> None:
        """So those who wait for this replica in another group's meeting of that key wait in vain."""
        self._came.add((meeting.key, rank))
        for other in self._expected.pop((meeting.key, rank), []):
            if other is not meeting:
                self._give_up_on(other, [rank], {rank: MEETS_OTHERS})

    def leave(self, rank: int) -> None:
        """A replica's work is done: it comes to no further meeting."""
        self._gone.add(rank)
        for meeting in [meeting for gathering in self._gathering.values() for meeting in gathering]:
            if rank in meeting.group and rank not in meeting.brought:
                self._give_up_on(meeting, [rank], {rank: LEFT})

    def die(self, rank: int) -> None:
        """A replica's machine stops: it is no member any more, and what it takes part in is lost."""
        self._dead.add(rank)
        self._sort_members()
        self.leave(rank)
        for meeting in list(self._under_way):
            if rank in meeting.group:
                if meeting.flow:
                    self.carrier.links.stop(meeting.flow)
                del self._under_way[meeting]
                self._give_up_on(meeting, [rank], {rank: DIED})
        self.when_dead(rank)

    def cut_off_from(self, rank: int, group: Group) -> list[int]:
        """The members of a group that a replica cannot reach now."""
        return on_another_side(rank, group, self._side)

    def _give_up_on(self, meeting: Meeting, lost: Collection[int], why: dict[int, str]) -> None:
        if lost and not meeting.settled:
            meeting.give_up(lost, why, self._side)  # those who have yet to come will find it settled

    def _next_hop(self, meeting: Meeting) -> None:
        assert meeting.under_way is not None
        demand = next(meeting.under_way, None)
        if demand is None:
            del self._under_way[meeting]
            meeting.settle(ended_at=self.clock.now)
            return

        def arrived() -> None:
            meeting.flow = None
            if not meeting.settled:
                self._next_hop(meeting)

        meeting.hop += 1
        # Groups of one round meet under one key, each its own first member.
        chance = f"{meeting.key}, {meeting.group[0]}, {meeting.hop}"
        meeting.flow = self.carrier.carry(demand, chance, arrived)
        meeting.limit = meeting.flow.limit
        if self._separated(meeting.group):
            self.carrier.links.set_limit(meeting.flow, 0.0)

    def _ask_for_faults(self) -> None:
        for death in self.conditions.deaths:
            self._check_rank(death.replica, "deaths")
            self.clock.at(death.at_s, lambda rank=death.replica: self.die(rank))  # type: ignore[misc]
        for cut in self.conditions.cuts:
            for rank in cut.replicas:
                self._check_rank(rank, "cuts")
            self.clock.at(cut.from_s, self._cut)
            self.clock.at(cut.until_s, self._cut)
        if any(cut.from_s == 0 for cut in self.conditions.cuts):
            self._cut()  # before anybody asks who is there

    def _check_rank(self, rank: int, where: str) -> None:
        if not 0 <= rank < len(self._everyone):
            raise UserError(f"{where} names replica {rank}; there are 0 to {len(self._everyone) - 1}")

    def _cut(self) -> None:
        """Somebody is cut off, or no longer: what is under way between the sides stands still meanwhile."""
        now = self.clock.now
        cuts = [cut for cut in self.conditions.cuts if cut.from_s <= now < cut.until_s]
        cut_off = {rank for cut in cuts for rank in cut.replicas}
        self._side = {rank: tuple(n for n, cut in enumerate(cuts) if rank in cut.replicas) for rank in cut_off}
        self._sort_members()
        for meeting in self._under_way:
            if meeting.flow:
                self.carrier.links.set_limit(meeting.flow, 0.0 if self._separated(meeting.group) else meeting.limit)

    def _sort_members(self) -> None:
        sides: dict[Side, list[int]] = {(): []}
        for rank in self.living:
            sides.setdefault(self._side.get(rank, ()), []).append(rank)
        self._members = {side: tuple(ranks) for side, ranks in sides.items()}
        for gathering in list(self._gathering.values()):
            for meeting in gathering:
                # Those who have yet to come will know other members, and may well come to another group.
                dead = {rank: DIED for rank in meeting.group if rank in self._dead}
                self._give_up_on(meeting, meeting.missing(), dead)

    def _separated(self, group: Group) -> bool:
        return bool(self._side) and len({self._side.get(rank, ()) for rank in group}) > 1
