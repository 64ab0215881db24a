"""When the rounds of a method happen, for thousands of replicas: the simulated network without tensors.

Clock, links and meetings are those that simulated training runs on; a replica here is its schedule alone.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from farflung.errors import UserError
from farflung.networks import Conditions, Group
from farflung.networks.simulator import Computation, Demand, Meeting, World
from farflung.outer import Method, traffic_per_hop

Replica = Generator["float | Meeting", None, None]
"""Yields seconds to compute for, or a meeting to wait for."""

KNOWN_GROUPS = 100
"""Rounds whose groups are kept: some replicas are ahead of others."""


@dataclass
class RoundTimes:
    """One round of one fragment, over all replicas. Times in seconds since the run began."""

    round: int
    fragment: int
    started: float = float("inf")
    landed: float = 0.0
    blocked: float = 0.0
    failed: int = 0
    replicas: int = 0


@dataclass
class Timing:
    """What a run without tensors came to.

    Args:
        seconds: until the last replica had landed its last round.
        steps: inner steps of each replica.
        computed, blocked: seconds of all replicas together.
        bytes_sent: payload that all replicas together sent.
        uplink: share of the time that the replicas' links for sending were used.
        rounds: each round, in order.
    """

    seconds: float = 0.0
    steps: int = 0
    computed: float = 0.0
    blocked: float = 0.0
    bytes_sent: float = 0.0
    uplink: float = 0.0
    rounds: list[RoundTimes] = field(default_factory=list)

    @property
    def seconds_per_round(self) -> float:
        """The mean; rounds of all fragments count as one."""
        return self.seconds / self.rounds_each

    @property
    def rounds_each(self) -> int:
        """Rounds of each fragment."""
        return len(self.rounds) // len({times.fragment for times in self.rounds})


@dataclass(frozen=True)
class Moment:
    """A step after which rounds begin or land: (fragment, round) of each."""

    step: int
    landing: tuple[tuple[int, int], ...]
    starting: tuple[tuple[int, int], ...]


class Timer:
    """Lets replicas hold their rounds in virtual time.

    Args:
        method: whose schedule, topology and way of averaging count.
        message_bytes: what a whole message takes, encoded, in a group of so many; fragments share it evenly.
        conditions: of the network.
        replicas: how many.
        rounds: how many each holds.
        deadline: the longest wait for others, seconds; infinity for none.
        work: what a round takes of a replica's own time: encoding, decoding, the outer step; seconds.

    Raises:
        UserError: the method has no rounds, or nobody lives to hold one.
    """

    def __init__(
        self,
        method: Method,
        message_bytes: Callable[[int], float],
        conditions: Conditions,
        replicas: int,
        rounds: int,
        deadline: float,
        work: float = 0.0,
    ) -> None:
        self._method = method
        self._message_bytes = message_bytes
        self._deadline = deadline
        self._work = work
        self._world = World(replicas, conditions)
        self._world.when_dead = self._bury
        self._replicas = replicas
        self._running: dict[int, Replica] = {}
        self._moments = moments(method, rounds)
        if not self._moments:
            raise UserError("a method without rounds has nothing to simulate; remove it")
        self._groups: dict[str, tuple[Group, dict[int, Group]]] = {}
        self._result = Timing(steps=self._moments[-1].step)
        self._times: dict[tuple[int, int], RoundTimes] = {}

    def run(self) -> Timing:
        """All rounds of all replicas."""
        world, result = self._world, self._result
        for rank in range(self._replicas):
            self._running[rank] = self._replica(rank)
            self._resume(rank)
        with _no_collection():
            while self._running and world.clock.advance():
                pass
        if not self._times:
            raise UserError("every replica dies before its first round; let some live longer")
        result.rounds = [self._times[key] for key in sorted(self._times, key=lambda key: (key[1], key[0]))]
        result.seconds = max(times.landed for times in result.rounds)
        capacity = sum(world.carrier.links.capacities[2 * rank] for rank in range(self._replicas))
        carried = sum(world.carrier.bytes_sent(rank) for rank in range(self._replicas))
        result.uplink = carried / capacity / result.seconds if result.seconds else 0.0
        return result

    def _resume(self, rank: int) -> None:
        """Lets a replica go on to what it waits for next."""
        replica, world = self._running.get(rank), self._world
        if replica is None:
            return
        wish = next(replica, None)
        if wish is None:
            del self._running[rank]  # it has come to every meeting that others could wait for it in
        elif isinstance(wish, Meeting):
            self._wait(rank, wish)
        else:
            self._result.computed += wish
            world.clock.at(world.clock.now + wish, lambda: self._resume(rank))

    def _wait(self, rank: int, meeting: Meeting) -> None:
        waits = True

        def go_on() -> None:
            nonlocal waits
            if waits:
                waits = False
                if deadline:
                    deadline.cancel()
                self._resume(rank)

        meeting.waiting.append(go_on)
        clock = self._world.clock
        deadline = clock.at(clock.now + self._deadline, go_on) if self._deadline < math.inf else None

    def _bury(self, rank: int) -> None:
        self._running.pop(rank, None)

    def _replica(self, rank: int) -> Replica:
        """One replica's run: compute up to the next moment, land what is due, start what begins."""
        computation = Computation(self._world.conditions, rank)
        in_flight: dict[tuple[int, int], Meeting | None] = {}
        step = 0
        for moment in self._moments:
            if moment.step > step:
                yield computation.seconds(moment.step - step)
                step = moment.step
            for key in moment.landing:
                if key in in_flight:
                    yield from self._land(key, in_flight.pop(key))
            for key in moment.starting:
                in_flight[key] = self._start(rank, *key)
            for key in moment.landing:
                if key in in_flight:  # without a delay, a round lands where it starts
                    yield from self._land(key, in_flight.pop(key))

    def _start(self, rank: int, fragment: int, round: int) -> Meeting | None:
        times = self._times.get((fragment, round))
        if times is None:
            times = self._times[fragment, round] = RoundTimes(round, fragment)
        times.started = min(times.started, self._world.clock.now)
        key = f"round {round} of fragment {fragment}"
        group = self._group(rank, key)
        return self._world.meet(rank, group, key, None, self._hops(group)) if len(group) > 1 else None

    def _land(self, key: tuple[int, int], meeting: Meeting | None) -> Iterator[float | Meeting]:
        clock, times = self._world.clock, self._times[key]
        began = clock.now
        if meeting and not meeting.settled:
            yield meeting
        times.landed = max(times.landed, clock.now)
        times.blocked += clock.now - began
        times.failed += meeting is not None and meeting.ended_at > clock.now
        times.replicas += 1
        self._result.blocked += clock.now - began
        if self._work:
            yield self._work

    def _group(self, rank: int, key: str) -> Group:
        members = self._world.members(rank)
        known, groups = self._groups.get(key, (None, {}))
        if known is not members:
            chosen = self._method.topology.groups(members, key)
            groups = {rank: group for group in chosen for rank in group}
            self._groups[key] = members, groups
            if len(self._groups) > KNOWN_GROUPS:
                del self._groups[next(iter(self._groups))]
        return groups.get(rank, ())

    def _hops(self, group: Group) -> Callable[[dict[int, None]], Iterator[Demand]]:
        def hops(brought: dict[int, None]) -> Iterator[Demand]:
            nbytes = self._message_bytes(len(group)) / self._method.schedule.fragments
            for part in traffic_per_hop(self._method.codec, self._method.averaging, len(group)):
                demand = Demand.alike(group, part * nbytes)
                self._result.bytes_sent += sum(demand.sent)
                yield demand

        return hops


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing here makes cycles of references; looking for them would take half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def moments(method: Method, rounds: int) -> list[Moment]:
    """The steps at which something happens, up to the landing of each fragment's last round."""
    schedule = method.schedule
    if not schedule.every:
        return []
    starting: dict[int, list[tuple[int, int]]] = {}
    landing: dict[int, list[tuple[int, int]]] = {}
    for fragment in range(schedule.fragments):
        first = schedule.first(fragment)
        for number in range(rounds):
            key = fragment, first // schedule.every + number
            begins = first + number * schedule.every
            starting.setdefault(begins, []).append(key)
            landing.setdefault(begins + schedule.delay, []).append(key)
    return [
        Moment(step, tuple(landing.get(step, ())), tuple(starting.get(step, ())))
        for step in sorted({*starting, *landing})
    ]
