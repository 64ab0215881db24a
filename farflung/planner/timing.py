"""Times the rounds of a method for thousands of replicas: simulated training without tensors.

Clock, links, collectives and rounds are those of simulated training; of a message, only its size is there.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from farflung.codecs import Dense
from farflung.durations import TICKS_PER_SECOND
from farflung.errors import UserError
from farflung.networks import Conditions, Group
from farflung.networks.peers.circles import passes
from farflung.networks.simulator.cluster import SimulatedCluster, SimulatedCollective
from farflung.networks.simulator.fabric import Demand
from farflung.networks.simulator.step_times import StepTimes
from farflung.outer import Method, Topology, traffic_per_hop
from farflung.outer.clock import SLACK
from farflung.outer.companions.base import Added
from farflung.outer.departures import Place, those_who_come
from farflung.outer.round import Offer, PendingRound, Rounds, Sync

Replica = Generator["float | SimulatedCollective", None, None]
"""Yields seconds of computing, or a collective to wait for."""

Traffic = Callable[[int], tuple[float, ...]]
"""What part of a message each member of a group of so many sends each other, hop after hop."""
Series = tuple[int, int]
"""A fragment's rounds, or what is averaged besides, by its number."""
ROUNDS = -1
"""The number of the rounds themselves."""
KNOWN_GROUPS = 100
"""Rounds whose groups are kept, since some replicas are ahead of others."""


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
    """The result of a run without tensors.

    Args:
        seconds: until the last replica had applied its last round.
        lasted: how long that took without the steps trained during the last round alone: so many rounds more take as
            long again, however many there are.
        steps: inner steps of each replica; by the clock, on average.
        computed, blocked: seconds of all replicas together, without these steps, too.
        bytes_sent: payload of all replicas together.
        uplink: the share of what the replicas' uplinks could carry that they carried.
        rounds: each round, in order.
    """

    seconds: float = 0.0
    lasted: float = 0.0
    steps: int = 0
    computed: float = 0.0
    blocked: float = 0.0
    bytes_sent: float = 0.0
    uplink: float = 0.0
    rounds: list[RoundTimes] = field(default_factory=list)

    @property
    def seconds_per_round(self) -> float:
        """The mean; the rounds of all fragments together count as one."""
        return self.lasted / self.rounds_each

    @property
    def rounds_each(self) -> int:
        """Rounds of each fragment."""
        return len(self.rounds) // len({times.fragment for times in self.rounds})


class Size:
    """The content of a fragment's rounds where only time counts: its share of the whole message."""

    def __init__(self, share: float) -> None:
        self._offer = Offer(share)

    def offer(self, fault: str) -> Offer[float]:
        """See Content; always the same."""
        return self._offer

    def keep(self, offer: Offer[float], delayed: bool) -> None:
        """See Content."""

    def step_alone(self, offer: Offer[float], members: int) -> None:
        """See Content."""

    def absorb(self, offer: Offer[float], mean: float, fresh: Offer[float] | None, delayed: bool) -> bool:
        """See Content."""
        return True


@dataclass
class Timer:
    """Lets replicas hold their rounds in virtual time.

    Args:
        message_bytes: the size of a whole encoded message in a group of so many; fragments share it evenly.
        rounds: how many each replica holds.
        deadline: the longest wait for others, seconds; infinity for none.
        work: what each round takes of a replica's own time (encoding, decoding, outer step), seconds.
        besides: what replicas average after each round besides its messages, on the mean; fragments share it evenly.

    Raises UserError where the method has no rounds, or every replica dies before its first.
    """

    method: Method
    message_bytes: Callable[[int], float]
    conditions: Conditions
    replicas: int
    rounds: int
    deadline: float
    work: float = 0.0
    besides: Sequence[Added] = ()

    def __post_init__(self) -> None:
        method = self.method
        if not method.schedule.every:
            raise UserError("a method without rounds has nothing to simulate; remove it")
        self._traffic_per_hop = cache(partial(traffic_per_hop, method.codec, method.averaging))
        self._dense_traffic = cache(partial(traffic_per_hop, Dense(), method.averaging))
        self._cluster = SimulatedCluster(self.replicas, self.conditions)
        self._cluster.when_dead = self._bury
        self._running: dict[int, Replica] = {}
        self._groups: dict[str, tuple[Group, dict[int, Group]]] = {}
        self._result = Timing()
        self._times: dict[tuple[int, int], RoundTimes] = {}
        self._steps: list[int] = []
        self._at: dict[Series, dict[int, Place]] = {}

    def run(self) -> Timing:
        """All rounds of all replicas."""
        cluster, result = self._cluster, self._result
        with _no_collection():
            for rank in range(self.replicas):
                self._running[rank] = self._replica(rank)
                self._resume(rank)
            while self._running and cluster.clock.advance():
                pass
        if not self._times:
            raise UserError("every replica dies before its first round; set later deaths")
        result.rounds = [self._times[key] for key in sorted(self._times, key=lambda key: (key[1], key[0]))]
        result.seconds = max(times.landed for times in result.rounds)
        capacity = sum(cluster.fabric.links.capacities[2 * rank] for rank in range(self.replicas))
        carried = sum(cluster.fabric.bytes_sent(rank) for rank in range(self.replicas))
        result.lasted = result.lasted or result.seconds  # where all have died
        result.uplink = carried / capacity / result.lasted if result.lasted else 0.0
        return result

    def _resume(self, rank: int) -> None:
        """Runs a replica up to its next wait."""
        replica, cluster = self._running.get(rank), self._cluster
        if replica is None:
            return
        wish = next(replica, None)
        if wish is None:
            del self._running[rank]  # it has joined every collective that others may wait in
        elif isinstance(wish, SimulatedCollective):
            self._wait(rank, wish)
        else:
            self._result.computed += wish
            cluster.clock.at(cluster.clock.now + wish, partial(self._resume, rank))

    def _wait(self, rank: int, collective: SimulatedCollective) -> None:
        waits = True

        def go_on() -> None:
            nonlocal waits
            if waits:
                waits = False
                if deadline:
                    deadline.cancel()
                self._resume(rank)

        collective.waiting.append(go_on)
        clock = self._cluster.clock
        deadline = clock.at(clock.now + self.deadline, go_on) if self.deadline < math.inf else None

    def _bury(self, rank: int) -> None:
        self._running.pop(rank, None)

    def _replica(self, rank: int) -> Replica:
        """One replica's run: computes up to the next step with something to do, and does that."""
        computation = StepTimes(self._cluster.conditions, rank)
        schedule = self.method.schedule
        sizes = [Size(1 / schedule.fragments)] * schedule.fragments
        rounds = Rounds[float, SimulatedCollective | None]([schedule] * len(sizes), sizes)
        last = [sync.rounds + self.rounds - 1 for sync in rounds.syncs]
        step, steps, trailing, hidden = 0, 0, 0.0, dict[int, list[SimulatedCollective]]()
        while following := rounds.next_step():
            if following > step:
                taken, seconds = yield from self._compute(computation, step, following)
                trailing += 0.0 if any(sync.next_start for sync in rounds.syncs) else seconds
                step, steps = following, steps + taken
            for due in rounds.after(step):
                if isinstance(due, PendingRound):
                    began = self._cluster.clock.now
                    if due.exchange and not due.exchange.settled:
                        yield due.exchange
                    hidden[due.fragment] = yield from self._average_besides(rank, due)
                    self._note(due, began)
                    self._comes(rank, due.round + 1, (), (due.fragment, ROUNDS))
                    if self.work:
                        yield self.work
                    continue
                began = self._cluster.clock.now
                yield from _unsettled(hidden.pop(due.index, []))
                for number in range(len(self.besides)):
                    self._comes(rank, due.rounds, (), (due.index, number))
                self._result.blocked += self._cluster.clock.now - began
                rounds.pending.append(self._start(rank, due, step))
                if due.rounds > last[due.index]:
                    due.stop()
        result = self._result
        self._steps.append(steps)
        result.steps = round(sum(self._steps) / len(self._steps))
        result.computed -= trailing
        result.lasted = max(result.lasted, self._cluster.clock.now - trailing)
        yield from _unsettled(itertools.chain.from_iterable(hidden.values()))  # sent, and no part of the rounds' time

    def _compute(self, computation: StepTimes, step: int, until: int) -> Generator[float, None, tuple[int, float]]:
        """Trains from a step on until another, or to the end of the step in which the clock comes to a moment.

        Returns how many inner steps that took, and seconds.
        """
        if not self.method.schedule.by_clock:
            seconds = computation.seconds(until - step)
            yield seconds
            return until - step, seconds
        taken, spent = 0, 0.0
        while taken == 0 or self._cluster.clock.now * TICKS_PER_SECOND + SLACK < until:
            seconds = computation.seconds(1)
            taken, spent = taken + 1, spent + seconds
            yield seconds
        return taken, spent

    def _start(self, rank: int, sync: Sync[float], step: int) -> PendingRound[float, SimulatedCollective | None]:
        label, times = sync.label, self._times.get((sync.index, sync.rounds))
        if times is None:
            times = self._times[sync.index, sync.rounds] = RoundTimes(sync.rounds, sync.index)
        times.started = min(times.started, self._cluster.clock.now)
        group = self._group(rank, label, self.method.topology, sync.rounds, (sync.index, ROUNDS))
        offer = sync.offer(str, len(group))
        share, traffic = offer.message, self._traffic_per_hop
        collective = self._join(rank, group, label, traffic, lambda members: self.message_bytes(members) * share)
        return sync.start(step, group, offer, collective)

    def _average_besides(
        self, rank: int, landed: PendingRound[float, SimulatedCollective | None]
    ) -> Generator[SimulatedCollective, None, list[SimulatedCollective]]:
        """After a round, waits for what is averaged besides; returns what need not come until the next one starts."""
        under_way, hidden = list[SimulatedCollective](), list[SimulatedCollective]()
        for number, added in enumerate(self.besides):
            label = f"besides {number} of round {landed.round} of fragment {landed.fragment}"
            group = self._group(rank, label, added.topology, landed.round, (landed.fragment, number))
            if collective := self._join(rank, group, label, self._dense_traffic, partial(self._bytes_besides, added)):
                (hidden if added.hidden else under_way).append(collective)
        yield from _unsettled(under_way)
        return hidden

    def _bytes_besides(self, added: Added, members: int) -> float:
        return added.nbytes / self.method.schedule.fragments

    def _note(self, pending: PendingRound[float, SimulatedCollective | None], began: float) -> None:
        """One replica applies a round now, having waited for it since `began`."""
        now, times, collective = self._cluster.clock.now, self._times[pending.fragment, pending.round], pending.exchange
        times.landed = max(times.landed, now)
        times.blocked += now - began
        times.failed += collective is not None and collective.ended_at > now
        times.replicas += 1
        self._result.blocked += now - began

    def _comes(self, rank: int, round: int, group: Group, series: Series) -> None:
        """Others may know with whom a replica has come to a round, or that it comes to none before it."""
        if self._cluster.faulty:
            self._at.setdefault(series, {})[rank] = round, group

    def _group(self, rank: int, key: str, topology: Topology, round: int, series: Series) -> Group:
        """With whom a replica comes to a round: as in outer.departures."""
        members = self._cluster.members(rank)
        if topology.identical and self._cluster.faulty:
            members = those_who_come(members, round, rank, self._at.get(series, {}))
        known, groups = self._groups.get(key, (None, {}))
        if known is not members:
            chosen = topology.groups(members, key)
            groups = {rank: group for group in chosen for rank in group}
            self._groups[key] = members, groups
            if len(self._groups) > KNOWN_GROUPS:
                del self._groups[next(iter(self._groups))]
        group = groups.get(rank, ())
        self._comes(rank, round, group or (rank,), series)
        return group

    def _join(
        self, rank: int, group: Group, label: str, traffic: Traffic, message_bytes: Callable[[int], float]
    ) -> SimulatedCollective | None:
        """Takes part in averaging a message, of traffic and bytes by a group's size; None where nobody else does."""

        def hops(brought: dict[int, None]) -> Iterator[Demand]:
            nbytes, parts = message_bytes(len(group)), traffic(len(group))
            packets = [(part * nbytes, 1) for part in parts]
            if self.conditions.store_ms is not None:
                packets = passes(len(group), parts, nbytes)
            for packet in packets:
                demand = Demand.even(group, *packet)
                self._result.bytes_sent += sum(demand.sent) / demand.readers
                yield demand

        if len(group) > 1:
            return self._cluster.join(rank, group, label, None, hops)
        self._cluster.comes(rank, label, None)
        return None


def _unsettled(collectives: Iterable[SimulatedCollective]) -> Generator[SimulatedCollective, None, None]:
    """Those to wait for, one after the other."""
    for collective in collectives:
        if not collective.settled:
            yield collective


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Turns garbage collection off: there are no cycles here, and the search for them would take half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
