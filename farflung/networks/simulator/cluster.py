"""Collectives of simulated replicas: who has come, what is under way, and who is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from farflung.errors import UserError
from farflung.networks.base import Group
from farflung.networks.simulator.clock import Clock
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.fabric import Demand, Fabric
from farflung.networks.simulator.flows import Flow

Hops = Callable[[dict[int, Any]], Iterator[Demand]]
"""Given what each member has brought: what is sent, hop after hop; each begins when the one before has arrived."""


Side = tuple[int, ...]
"""The cuts that a replica is behind, by number; () without any."""

DIED, LEFT, CUT_OFF = "has died", "has left the run", "is cut off"
MEETS_OTHERS = "meets others, since the members have changed"


def on_another_side(rank: int, group: Group, sides: Mapping[int, Side]) -> list[int]:
    """The members of a group that a replica cannot reach."""
    return [other for other in group if sides.get(other, ()) != sides.get(rank, ())] if sides else []


class SimulatedCollective:
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
        """Ends it without a result, and tells those who wait; `why` is known of some of the lost."""
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


class SimulatedCluster:
    """The replicas' clock and links, who is there, and their collectives; observers have links, and are no members."""

    def __init__(self, replicas: int, conditions: Conditions, observers: int = 0) -> None:
        self.clock = Clock()
        self.conditions = conditions
        self.fabric = Fabric(self.clock, conditions, replicas + observers)
        self._everyone = tuple(range(replicas))
        self._replicas = range(replicas)
        self._gone: set[int] = set()
        self._dead: set[int] = set()
        self._side: dict[int, Side] = {}
        self._members: dict[Side, Group] = {(): self._everyone}
        self._forming: dict[str, list[SimulatedCollective]] = {}
        self.faulty = bool(conditions.cuts or conditions.deaths)
        self._came: set[tuple[str, int]] = set()
        self._expected: dict[tuple[str, int], list[SimulatedCollective]] = {}
        self._under_way: dict[SimulatedCollective, None] = {}
        self.when_dead: Callable[[int], None] = lambda rank: None
        self._ask_for_faults()

    def members(self, rank: int) -> Group:
        """The living replicas that one can reach, itself included. Those whose work is done count as living."""
        return self._members[self._side.get(rank, ())] if rank in self._replicas else (rank,)

    def seats(self, rank: int) -> Group:
        """All replicas that have ever been there; an observer sees itself."""
        return self._everyone if rank in self._replicas else (rank,)

    @property
    def living(self) -> Group:
        """All replicas that have not died."""
        return tuple(rank for rank in self._everyone if rank not in self._dead)

    def join(self, rank: int, group: Group, key: str, brings: Any, hops: Hops) -> SimulatedCollective:
        """A replica comes to a collective, which is made by whoever comes first."""
        # By first member: hashing a group of thousands for each of them would take most of the time.
        place = f"{key}, {group[0]}"
        forming = self._forming.setdefault(place, [])
        for collective in forming:
            if collective.group is group or collective.group == group:
                break
        else:
            collective = SimulatedCollective(group, key)
            forming.append(collective)
            if self.faulty:
                self._expect(collective)
        collective.brought[rank] = brings
        self.comes(rank, key, collective)
        if len(collective.brought) == len(group) and not collective.settled:
            forming.remove(collective)
            if not forming:
                del self._forming[place]
            self._under_way[collective] = None
            collective.under_way = self.fabric.ways(hops(collective.brought))
            self._next_hop(collective)
        elif self._gone or self._side:  # who is missing is looked for by each of thousands
            gone = {one: DIED if one in self._dead else LEFT for one in collective.missing() if one in self._gone}
            self._give_up_on(collective, {*gone, *self.cut_off_from(rank, group)}, gone)
        return collective

    def _expect(self, collective: SimulatedCollective) -> None:
        """Nobody comes twice under one key: who has come to another group's collective is lost to this one."""
        elsewhere = {rank for rank in collective.group if (collective.key, rank) in self._came}
        self._give_up_on(collective, elsewhere, dict.fromkeys(elsewhere, MEETS_OTHERS))
        for rank in collective.group:
            if rank not in elsewhere:
                self._expected.setdefault((collective.key, rank), []).append(collective)

    def comes(self, rank: int, key: str, to: SimulatedCollective | None) -> None:
        """A replica comes to a collective of a key, or to none; those wait in vain who expect it at another."""
        if self.faulty:
            self._came.add((key, rank))
            for other in self._expected.pop((key, rank), []):
                if other is not to:
                    self._give_up_on(other, [rank], {rank: MEETS_OTHERS})

    def leave(self, rank: int) -> None:
        """A replica's work is done: it comes to no further collective."""
        self._gone.add(rank)
        for collective in [collective for forming in self._forming.values() for collective in forming]:
            if rank in collective.group and rank not in collective.brought:
                self._give_up_on(collective, [rank], {rank: LEFT})

    def die(self, rank: int) -> None:
        """A replica's machine stops: it is no member any more, and what it takes part in is lost."""
        self._dead.add(rank)
        self._sort_members()
        self.leave(rank)
        for collective in list(self._under_way):
            if rank in collective.group:
                if collective.flow:
                    self.fabric.links.stop(collective.flow)
                del self._under_way[collective]
                self._give_up_on(collective, [rank], {rank: DIED})
        self.when_dead(rank)

    def cut_off_from(self, rank: int, group: Group) -> list[int]:
        """The members of a group that a replica cannot reach now."""
        return on_another_side(rank, group, self._side)

    def _give_up_on(self, collective: SimulatedCollective, lost: Collection[int], why: dict[int, str]) -> None:
        if lost and not collective.settled:
            collective.give_up(lost, why, self._side)  # those who have yet to come will find it settled

    def _next_hop(self, collective: SimulatedCollective) -> None:
        assert collective.under_way is not None
        demand = next(collective.under_way, None)
        if demand is None:
            del self._under_way[collective]
            collective.settle(ended_at=self.clock.now)
            return

        def arrived() -> None:
            collective.flow = None
            if not collective.settled:
                self._next_hop(collective)

        collective.hop += 1
        # Groups of one round meet under one key, each its own first member.
        chance = f"{collective.key}, {collective.group[0]}, {collective.hop}"
        collective.flow = self.fabric.send(demand, chance, arrived)
        collective.limit = collective.flow.limit
        self._hold_between_sides(collective)

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
        for collective in self._under_way:
            self._hold_between_sides(collective)

    def _sort_members(self) -> None:
        sides: dict[Side, list[int]] = {(): []}
        for rank in self.living:
            sides.setdefault(self._side.get(rank, ()), []).append(rank)
        self._members = {side: tuple(ranks) for side, ranks in sides.items()}
        for forming in list(self._forming.values()):
            for collective in forming:
                if collective.group[-1] not in self._replicas:
                    continue  # its group is one replica and one observer, whoever the members are
                # Whoever comes to another group, since it knows other members, is lost to this one when it comes there.
                dead = {rank: DIED for rank in collective.group if rank in self._dead}
                if dead or self._divided(collective.group):
                    self._give_up_on(collective, collective.missing(), dead)

    def _divided(self, group: Group) -> bool:
        """Whether a cut goes through a group."""
        return bool(self._side) and len({self._side.get(rank, ()) for rank in group}) > 1

    def _hold_between_sides(self, collective: SimulatedCollective) -> None:
        limit = 0.0 if self._divided(collective.group) else collective.limit
        if collective.flow and collective.flow.limit != limit:
            self.fabric.links.set_limit(collective.flow, limit)
