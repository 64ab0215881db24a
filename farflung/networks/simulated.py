"""N replicas in one process, under a virtual clock.

Each replica runs in a thread of its own, but only one thread runs at a time: it holds the baton. A replica that waits,
or that has computed a step, hands the baton to the one whose clock is furthest behind. So no result depends on
thread timing, and the replicas' code is the same as on a real network.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from farflung.networks.base import Combine, Finished, Group, PeerLost, Pending, Traffic, mean_in_order
from farflung.networks.conditions import Conditions

T = TypeVar("T")


class Simulation:
    """The world of the simulated replicas: their clocks, their links, and who runs now."""

    def __init__(self, replicas: int, conditions: Conditions | None = None) -> None:
        self.conditions = conditions or Conditions()
        self.networks = [SimulatedNetwork(self, rank, replicas) for rank in range(replicas)]
        self._meetings: dict[tuple[str, Group], _Meeting] = {}

    def run(self, work: Callable[[SimulatedNetwork], T]) -> list[T]:
        """Runs `work` once for each replica; returns what each returned, by rank.

        A replica whose work returns or raises has left: whoever waits for it then gets PeerLost. The error that came
        first is raised once all have left.
        """
        results: list[Any] = [None] * len(self.networks)
        errors: list[BaseException] = []

        def live(network: SimulatedNetwork) -> None:
            network.seat.take()
            try:
                results[network.rank] = work(network)
            except BaseException as error:
                errors.append(error)
            finally:
                network.seat.left = True
                self.pass_baton(network)

        threads = [
            threading.Thread(target=live, args=(network,), name=f"replica-{network.rank}", daemon=True)
            for network in self.networks
        ]
        random_state = torch.get_rng_state()
        for network, thread in zip(self.networks, threads, strict=True):
            network.seat.random_state = random_state
            thread.start()
        self.networks[0].seat.turn.set()
        for thread in threads:
            thread.join()
        torch.set_rng_state(random_state)
        if errors:
            raise errors[0]
        return results

    def meeting(self, key: str, group: Group) -> _Meeting:
        """A group's exchange named `key`, made by whoever comes first."""
        meeting = self._meetings.setdefault((key, group), _Meeting(group))
        if len(meeting.posts) == len(group) - 1:
            del self._meetings[key, group]  # its last member has come: those who wait hold on to it
        return meeting

    def left_at(self, rank: int) -> float:
        """When a replica's work ended, on its own clock; infinity while it goes on."""
        network = self.networks[rank]
        return network.clock if network.seat.left else math.inf

    def pass_baton(self, holder: SimulatedNetwork) -> None:
        """Lets the replica run that is furthest behind; returns when it is the holder's turn again."""
        ready = [network for network in self.networks if network.seat.can_run()]
        if ready:
            chosen = min(ready, key=lambda network: (network.clock, network.rank))
        else:
            waiting = [network for network in self.networks if not network.seat.left]
            if not waiting:
                return
            # Everyone waits for someone who never comes: time passes until the first deadline.
            chosen = min(waiting, key=lambda network: (network.seat.gives_up_at, network.rank))
        if chosen is holder:
            return
        holder.seat.keep()
        chosen.seat.turn.set()
        if not holder.seat.left:
            holder.seat.take()


@dataclass
class _Seat:
    """What the baton needs to know of one replica."""

    turn: threading.Event = field(default_factory=threading.Event)
    left: bool = False
    waits_for: Callable[[], bool] | None = None
    gives_up_at: float = math.inf
    random_state: Tensor = field(default_factory=torch.get_rng_state)

    def can_run(self) -> bool:
        return not self.left and (self.waits_for is None or self.waits_for())

    def take(self) -> None:
        """Waits for the baton; each replica has its own stream of torch's random numbers, as in its own process."""
        self.turn.wait()
        self.turn.clear()
        torch.set_rng_state(self.random_state)

    def keep(self) -> None:
        self.random_state = torch.get_rng_state()


@dataclass(frozen=True)
class _Post:
    """One member's part in a meeting: its tensor or packets, and when its link has sent all of it."""

    payload: Any
    sent_at: float


@dataclass
class _Meeting:
    """One exchange: who takes part, and what they have brought."""

    group: Group
    posts: dict[int, _Post] = field(default_factory=dict)
    combines: dict[int, Combine] = field(default_factory=dict)
    mean: Tensor | None = None
    relayed: dict[int, Tensor] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.group if rank not in self.posts]

    def others(self, rank: int) -> list[_Post]:
        return [self.posts[other] for other in self.group if other != rank]

    def combined(self) -> dict[int, Tensor]:
        """What each member has made of the packets for it (of a relay)."""
        if not self.relayed:
            for rank, combine in sorted(self.combines.items()):
                theirs = {other: self.posts[other].payload[rank] for other in self.group if other != rank}
                self.relayed[rank] = combine(theirs)
        return self.relayed

    def all_sent_at(self, transfer_seconds: Callable[[int], float]) -> float:
        """When the last link is done, with its second sending in a relay, which begins when all packets are there."""
        last = max(post.sent_at for post in self.posts.values())
        if not self.combines:
            return last
        sizes = [packet.nbytes for packet in self.combined().values()]
        return last + transfer_seconds((len(self.group) - 1) * max(sizes))

    def average(self) -> Tensor:
        """The mean of all payloads, computed once, before anyone overwrites its own."""
        if self.mean is None:
            self.mean = mean_in_order([self.posts[rank].payload for rank in self.group])
        return self.mean


class SimulatedNetwork:
    """One simulated replica's seat. Made by `Simulation`, or alone by `alone()`."""

    def __init__(self, world: Simulation, rank: int, replicas: int) -> None:
        self.world = world
        self.rank = rank
        self.traffic = Traffic()
        self.clock = 0.0
        self.seat = _Seat()
        self._members = tuple(range(replicas))
        self._link_free_at = 0.0

    @classmethod
    def alone(cls, conditions: Conditions | None = None) -> SimulatedNetwork:
        """A network of one replica, for code that runs without others."""
        return Simulation(1, conditions).networks[0]

    def members(self) -> Group:
        """Every replica, also those that have left: all must agree on the groups, and who has left fails at once."""
        return self._members

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[dict[int, Tensor]]:
        """See Network. The packet goes to each of the others, one after the other."""
        if group == (self.rank,):
            return Finished({self.rank: packet}, self.clock)
        others = len(group) - 1
        meeting = self._post(packet, group, key, others * packet.nbytes)

        def collect() -> dict[int, Tensor]:
            packets = {rank: post.payload for rank, post in sorted(meeting.posts.items())}
            for rank, other in packets.items():
                if rank != self.rank:
                    self.traffic.received(other.nbytes)
            return packets

        return _SimulatedPending(self, meeting, 1, collect)

    def relay(self, packets: dict[int, Tensor], group: Group, key: str, combine: Combine) -> Pending[dict[int, Tensor]]:
        """See Network. Whoever needs a result first has all members combine, in order of rank."""
        meeting = self._post(packets, group, key, sum(packet.nbytes for packet in packets.values()))
        meeting.combines[self.rank] = combine

        def collect() -> dict[int, Tensor]:
            self.traffic.sent((len(group) - 1) * meeting.combined()[self.rank].nbytes)
            busy_until = meeting.all_sent_at(self.world.conditions.transfer_seconds)
            self._link_free_at = max(self._link_free_at, busy_until)
            for post in meeting.others(self.rank):
                self.traffic.received(post.payload[self.rank].nbytes)
            for rank, packet in meeting.combined().items():
                if rank != self.rank:
                    self.traffic.received(packet.nbytes)
            return dict(meeting.combined())

        return _SimulatedPending(self, meeting, 2, collect)

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network. Each member averages one part of the tensor and sends it to all."""
        if group == (self.rank,):
            return Finished(tensor, self.clock)
        share = 2 * (len(group) - 1) / len(group)
        nbytes = round(share * tensor.nbytes)
        meeting = self._post(tensor, group, key, nbytes)

        def collect() -> Tensor:
            self.traffic.received(nbytes)
            return tensor.copy_(meeting.average())

        return _SimulatedPending(self, meeting, 2, collect)

    def computed(self) -> None:
        """One inner step has taken `step_ms`; the replica furthest behind goes on."""
        self.clock += self.world.conditions.step_ms / 1000
        self.world.pass_baton(self)

    def now(self) -> float:
        """This replica's virtual clock, seconds."""
        return self.clock

    def _post(self, payload: Any, group: Group, key: str, nbytes: int) -> _Meeting:
        meeting = self.world.meeting(key, group)
        begins = max(self.clock, self._link_free_at)
        self._link_free_at = begins + self.world.conditions.transfer_seconds(nbytes)
        meeting.posts[self.rank] = _Post(payload, self._link_free_at)
        self.traffic.sent(nbytes)
        return meeting


class _SimulatedPending(Generic[T]):
    """An exchange on the virtual clock; `hops` is how many messages follow one another in it."""

    def __init__(self, network: SimulatedNetwork, meeting: _Meeting, hops: int, collect: Callable[[], T]) -> None:
        self._network = network
        self._meeting = meeting
        self._hops = hops
        self._collect = collect
        self.finished_at = math.inf

    def done(self) -> bool:
        return self._arrives_at() <= self._network.clock or self._hopeless()

    def wait(self, timeout: float) -> T:
        network, seat = self._network, self._network.seat
        began = network.clock
        seat.waits_for, seat.gives_up_at = self._settled, began + timeout
        while not self._settled():
            network.world.pass_baton(network)
            if not self._settled() and not any(other.seat.can_run() for other in network.world.networks):
                break  # nobody can help any more: the deadline has come
        seat.waits_for, seat.gives_up_at = None, math.inf

        arrives_at = self._arrives_at()
        gives_up_at = min(began + timeout, self._someone_left_at())
        network.clock = max(began, min(arrives_at, gives_up_at))
        network.traffic.seconds_blocked += network.clock - began
        self.finished_at = min(arrives_at, network.clock)
        if arrives_at > network.clock:
            raise self._lost(timeout)
        return self._collect()

    def _settled(self) -> bool:
        return not self._meeting.missing() or self._hopeless()

    def _hopeless(self) -> bool:
        return self._someone_left_at() < math.inf

    def _someone_left_at(self) -> float:
        """When one of the missing left the run, as its clock then said."""
        world = self._network.world
        return min((world.left_at(rank) for rank in self._meeting.missing()), default=math.inf)

    def _arrives_at(self) -> float:
        if self._meeting.missing():
            return math.inf
        conditions = self._network.world.conditions
        return self._meeting.all_sent_at(conditions.transfer_seconds) + self._hops * conditions.latency_ms / 1000

    def _lost(self, timeout: float) -> PeerLost:
        posts = {} if self._meeting.combines else self._meeting.posts
        delivered = {rank: post.payload for rank, post in sorted(posts.items())}
        missing = self._meeting.missing()
        if not missing:
            return PeerLost(self._meeting.group, f"the exchange takes longer than the deadline of {timeout:g} s")
        why = "has left the run" if self._hopeless() else f"did not deliver within {timeout:g} s"
        return PeerLost(missing, f"replica {', '.join(map(str, missing))} (simulated) {why}", delivered)
