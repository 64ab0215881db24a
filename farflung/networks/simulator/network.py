"""N replicas in one process, under a virtual clock.

Each replica runs in a thread of its own, but only one thread runs at a time: it holds the baton. A replica that waits
or computes a step passes the baton to one that is ready; if none is, the clock advances. So no result depends on thread
timing, and the replicas' code is the same as on a real network.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.networks.base import (
    Combine,
    Finished,
    Group,
    Packets,
    Pending,
    TimedNetwork,
    Traffic,
    mean_in_order,
)
from farflung.networks.peers.circles import passes
from farflung.networks.simulator.board import SimulatedBoard, Topics
from farflung.networks.simulator.cluster import Hops, SimulatedCluster, SimulatedCollective
from farflung.networks.simulator.conditions import Conditions
from farflung.networks.simulator.fabric import Demand
from farflung.networks.simulator.pending import SimulatedPending
from farflung.networks.simulator.step_times import StepTimes
from farflung.renamed import Formerly

T = TypeVar("T")


class ReplicaDiedError(BaseException):
    """A simulated replica's machine stopped, as its conditions say; not for catching."""


class Simulation:
    """The simulated replicas, and who of them runs now; after them come observers, which are nobody's members.

    Raises UserError for a number of replicas that is none.
    """

    def __init__(self, replicas: int, conditions: Conditions | None = None, observers: int = 0) -> None:
        if not isinstance(replicas, int) or replicas < 1:
            raise UserError(f"replicas is {replicas!r}; give a whole number, at least 1")
        self.conditions = conditions or Conditions()
        self.cluster = SimulatedCluster(replicas, self.conditions, observers)
        self.cluster.when_dead = self._stop
        self.topics = Topics()
        self.networks = [SimulatedNetwork(self, rank) for rank in range(replicas + observers)]
        self._ready: deque[SimulatedNetwork] = deque()
        self._met: list[_Visit] = []

    def run(self, work: Callable[[SimulatedNetwork], T]) -> list[T]:
        """Runs `work` once for each replica; returns what each returned, by rank, and None for those that died.

        A replica whose work returns or raises has left: whoever waits for it then gets PeerLostError. The error that
        came first is raised once all have left.
        """
        results: list[Any] = [None] * len(self.networks)
        errors: list[BaseException] = []

        def live(network: SimulatedNetwork) -> None:
            network.baton.take()
            try:
                results[network.rank] = work(network)
            except ReplicaDiedError:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                network.baton.left = True
                self.cluster.leave(network.rank)
                self.pass_baton(network)

        threads = [
            threading.Thread(target=live, args=(network,), name=f"replica-{network.rank}", daemon=True)
            for network in self.networks
        ]
        random_state = torch.get_rng_state()
        for network, thread in zip(self.networks, threads, strict=True):
            network.baton.random_state = random_state
            thread.start()
        self._ready.extend(self.networks[1:])
        self.networks[0].baton.turn.set()
        for thread in threads:
            thread.join()
        torch.set_rng_state(random_state)
        if errors:
            raise errors[0]
        return results

    def make_ready(self, network: SimulatedNetwork) -> None:
        """Lets a replica run that waits, when its turn comes."""
        if network.baton.waits:
            network.baton.waits = False
            self._ready.append(network)

    def block(self, network: SimulatedNetwork) -> None:
        """Passes the baton on; returns when somebody has made the replica ready."""
        network.baton.waits = True
        self.pass_baton(network)
        if network.baton.died:
            raise ReplicaDiedError

    def meet(self, network: SimulatedNetwork, brings: T, work: Callable[[Sequence[T]], Sequence[Any]]) -> Any:
        """See SimulatedNetwork."""
        visit = _Visit(network, brings, work)
        self._met.append(visit)
        try:
            self.block(network)
            if visit in self._met:  # the first of those who wait works for all, in the state of its own thread
                self._hold_meeting()
        finally:
            if visit in self._met:  # it has died
                self._met.remove(visit)
        if visit.error:
            raise visit.error
        return visit.result

    def _hold_meeting(self) -> None:
        visits, self._met = self._met, []
        try:
            results = visits[0].work([visit.brings for visit in visits])
            for visit, result in zip(visits, results, strict=True):
                visit.result = result
        except Exception as error:  # it is the visitors', whoever has the baton
            for visit in visits:
                visit.error = error
        for visit in visits[1:]:
            self.make_ready(visit.network)

    def pass_baton(self, holder: SimulatedNetwork) -> None:
        """Lets the next one run; returns when it is the holder's turn again, or at once if it has left."""
        while not self._ready:
            if self._met and not self.cluster.clock.due():
                self.make_ready(self._met[0].network)
                continue
            if all(network.baton.left for network in self.networks):
                return
            if not self.cluster.clock.advance():
                raise RuntimeError("all simulated replicas wait, and nothing is to come")
        chosen = self._ready.popleft()
        if chosen is holder:
            return
        holder.baton.keep()
        chosen.baton.turn.set()
        if not holder.baton.left:
            holder.baton.take()

    def _stop(self, rank: int) -> None:
        network = self.networks[rank]
        network.baton.died = True
        self.make_ready(network)


@dataclass
class _Baton:
    """What the baton needs to know of one replica."""

    turn: threading.Event = field(default_factory=threading.Event)
    left: bool = False
    waits: bool = False
    died: bool = False
    random_state: Tensor = field(default_factory=torch.get_rng_state)

    def take(self) -> None:
        """Waits for the baton; each replica has its own stream of torch's random numbers, as in its own process."""
        self.turn.wait()
        self.turn.clear()
        torch.set_rng_state(self.random_state)

    def keep(self) -> None:
        self.random_state = torch.get_rng_state()


@dataclass(eq=False)
class _Visit:
    """What a replica brings to a meeting, and what comes of it."""

    network: SimulatedNetwork
    brings: Any
    work: Callable[[Sequence[Any]], Sequence[Any]]
    result: Any = None
    error: Exception | None = None


class SimulatedNetwork:
    """One simulated replica's seat. Made by `Simulation`, or alone by `alone()`."""

    relay, computed = Formerly("scatter_combine_gather"), Formerly("advance")
    elastic = islands = near = None
    processes: tuple[int, ...] = ()
    worth_a_packet = 0

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.simulation = simulation
        self.rank = rank
        self.traffic = Traffic()
        self.baton = _Baton()
        self.board = SimulatedBoard(simulation.topics, rank, simulation.cluster.faulty)
        self._cluster = simulation.cluster
        self._within: Group | None = None
        self._step_times = StepTimes(simulation.conditions, rank)
        self.timed: TimedNetwork = self
        self._attachments = itertools.count()
        self._steps = 0

    @classmethod
    def alone(cls, conditions: Conditions | None = None) -> SimulatedNetwork:
        """A network of one replica, for code that runs without others."""
        return Simulation(1, conditions).networks[0]

    def members(self) -> Group:
        """The living whom this replica can reach, also those that have finished: these fail at once."""
        reached = self._cluster.members(self.rank)
        return reached if self._within is None else tuple(rank for rank in reached if rank in self._within)

    @property
    def seats(self) -> Group:
        """All replicas of the run, those that have died or are cut off among them."""
        return self._cluster.seats(self.rank) if self._within is None else self._within

    @property
    def cut_off(self) -> Group:
        """The living whom it cannot reach now: an exchange with them is lost at once, for them too when they come."""
        return tuple(sorted({*self._cluster.living}.difference(self._cluster.members(self.rank))))

    def among(self, group: Group) -> SimulatedNetwork:
        """The same seat, where only those of a group are members."""
        seat = copy.copy(self)
        seat._within = group
        return seat

    def attachment(self) -> int:
        """See Network."""
        return next(self._attachments)

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.now())
        self.traffic.sent(self._copies(group) * packet.nbytes)

        def hops(packets: Packets) -> Iterator[Demand]:
            yield _the_same(group, [packets[rank].nbytes for rank in group])

        def collect(collective: SimulatedCollective) -> Packets:
            packets = dict(sorted(collective.brought.items()))
            for rank, other in packets.items():
                if rank != self.rank:
                    self.traffic.received(other.nbytes)
            return packets

        return self._join(group, key, packet, hops, collect)

    def all_to_all(self, packets: Packets, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        if group == (self.rank,):
            return Finished({}, self.now())
        self.traffic.sent(sum(packet.nbytes for packet in packets.values()))

        def collect(collective: SimulatedCollective) -> Packets:
            received = {rank: collective.brought[rank][self.rank] for rank in group if rank != self.rank}
            for packet in received.values():
                self.traffic.received(packet.nbytes)
            return received

        return self._join(group, key, packets, lambda brought: iter([_each_its_own(group, brought)]), collect)

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network. All members combine at once, in order of rank."""
        self.traffic.sent(sum(packet.nbytes for packet in packets.values()))
        brings = _Parcels(packets, combine)

        def hops(brought: dict[int, _Parcels]) -> Iterator[Demand]:
            yield _each_its_own(group, {rank: theirs.packets for rank, theirs in brought.items()})
            for rank in group:
                theirs = {other: brought[other].packets[rank] for other in group if other != rank}
                brought[rank].combined = brought[rank].combine(theirs)
            yield _the_same(group, [brought[rank].combined.nbytes for rank in group])

        def collect(collective: SimulatedCollective) -> Packets:
            brought: dict[int, _Parcels] = collective.brought
            combined = {rank: brought[rank].combined for rank in group}
            self.traffic.sent(self._copies(group) * combined[self.rank].nbytes)
            for rank in group:
                if rank != self.rank:
                    self.traffic.received(brought[rank].packets[self.rank].nbytes)
                    self.traffic.received(combined[rank].nbytes)
            return combined

        return self._join(group, key, brings, hops, collect)

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each member averages one part of the tensor and sends it to all; or in a folder, as there."""
        if group == (self.rank,):
            return Finished(tensor, self.now())
        parts = (1 / len(group),) * 2
        packets = [(part * tensor.nbytes, 1) for part in parts]
        if self.simulation.conditions.store_ms is not None:
            packets = passes(len(group), parts, tensor.nbytes)
        self.traffic.sent(round(sum((len(group) - 1) * nbytes / readers for nbytes, readers in packets)))

        def hops(tensors: Packets) -> Iterator[Demand]:
            yield from (Demand.even(group, *packet) for packet in packets)
            mean = mean_in_order([tensors[rank] for rank in group])
            for rank in group:
                tensors[rank].copy_(mean)

        def collect(collective: SimulatedCollective) -> Tensor:
            self.traffic.received(round(sum((len(group) - 1) * nbytes for nbytes, _ in packets)))
            return tensor

        return self._join(group, key, tensor, hops, collect)

    def advance(self) -> None:
        """One inner step takes its time; others go on meanwhile."""
        self._steps += 1
        self._sleep_until(self.now() + self._step_times.seconds(1))

    def meet(self, brings: T, work: Callable[[Sequence[T]], Sequence[Any]]) -> Any:
        """Waits until no other replica has anything to do at this moment, and takes no time of the virtual clock.

        Then `work` is called once, with what those who wait here have brought; each gets its part of the result, or
        its error.
        """
        return self.simulation.meet(self, brings, work)

    def now(self) -> float:
        """The virtual clock, seconds."""
        return self._cluster.clock.now

    def clock(self) -> dict[str, float]:
        """See TimedNetwork."""
        return {"now": self.now(), "computed": self._steps}

    def resume(self, clock: Mapping[str, float]) -> None:
        """See TimedNetwork. Faults of before happen in passing, when nobody is there whom they could concern."""
        self._steps = int(clock["computed"])
        for _ in range(self._steps):
            self._step_times.seconds(1)
        self._sleep_until(clock["now"])

    def stay_dead(self) -> NoReturn:
        """Joins nothing until the moment of this replica's death, which an earlier part of the run has seen."""
        if all(death.replica != self.rank for death in self.simulation.conditions.deaths):
            self._cluster.die(self.rank)
        else:
            self.simulation.block(self)
        raise ReplicaDiedError

    def _copies(self, group: Group) -> int:
        """How often one sends what is the same for all others."""
        return len(group) - 1 if self.simulation.conditions.store_ms is None else 1

    def _sleep_until(self, moment: float) -> None:
        self._cluster.clock.at(moment, partial(self.simulation.make_ready, self))
        self.simulation.block(self)

    def _join(
        self, group: Group, key: str, brings: Any, hops: Hops, collect: Callable[[SimulatedCollective], T]
    ) -> SimulatedPending[T]:
        collective = self._cluster.join(self.rank, group, key, brings, hops)
        return SimulatedPending(self, collective, collect)


@dataclass
class _Parcels:
    """What one member brings, and what it then makes of the others' packets."""

    packets: Packets
    combine: Combine
    combined: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


def _the_same(group: Group, sizes: Sequence[int]) -> Demand:
    """What travels where each member has one packet for all others."""
    others = len(group) - 1
    return Demand(group, [others * n for n in sizes], [sum(sizes) - n for n in sizes], max(sizes), others)


def _each_its_own(group: Group, brought: Mapping[int, Packets]) -> Demand:
    """What travels where each member has brought a packet for each of the others."""
    sizes = {rank: {to: packet.nbytes for to, packet in brought[rank].items()} for rank in group}
    sent = [sum(sizes[rank].values()) for rank in group]
    received = [sum(theirs.get(rank, 0) for theirs in sizes.values()) for rank in group]
    return Demand(group, sent, received, max(max(theirs.values()) for theirs in sizes.values()))
