"""What every network offers: a seat among the replicas, and moving packets between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.networks.board import Words

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Group = tuple[int, ...]
"""The ranks that take part in an exchange, sorted, this replica's own among them."""

Packets = dict[int, Tensor]
"""Packets by the rank of their sender, or of their receiver."""

Combine = Callable[[Packets], Tensor]
"""Combines packets, by the ranks of their senders in order, into one."""


class PeerLostError(Exception):
    """Some members of a group did not deliver: they died, or their deadline passed.

    The reason says what happened, with their addresses, and what to try. `delivered` are the packets of those who did
    deliver, own included (of an `exchange`).
    """

    def __init__(self, ranks: Sequence[int], reason: str, delivered: Packets | None = None) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)
        self.delivered = delivered or {}


def told_fates(fates: Mapping[int, str], kind: str = "") -> str:
    """What has become of some replicas, of one kind, in a line: those of one fate together."""
    alike = {why: [str(rank) for rank in sorted(fates) if fates[rank] == why] for why in dict.fromkeys(fates.values())}
    return "; ".join(f"replica {', '.join(ranks)}{kind} {why}" for why, ranks in alike.items())


@dataclass
class Traffic:
    """What one replica has sent, received and waited for. Bytes are payload, without the transport's own."""

    bytes_sent: int = 0
    bytes_received: int = 0
    packets_sent: int = 0
    packets_received: int = 0
    seconds_blocked: float = 0.0
    requests: int = 0
    """Of a store, where replicas meet in one."""

    def sent(self, nbytes: int) -> None:
        """Counts one packet that left."""
        self.bytes_sent += nbytes
        self.packets_sent += 1

    def received(self, nbytes: int) -> None:
        """Counts one packet that came."""
        self.bytes_received += nbytes
        self.packets_received += 1


class Pending(Protocol[T_co]):
    """An exchange that is under way."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def wait(self, timeout: float) -> T_co:
        """The result, after at most `timeout` seconds of the network's clock. Raises PeerLostError."""

    @property
    def finished_at(self) -> float:
        """When the exchange ended, on the network's clock; defined once `wait` has returned or raised."""


@dataclass(frozen=True)
class Finished(Generic[T]):
    """A Pending that has nothing left to wait for."""

    value: T
    finished_at: float

    def done(self) -> bool:
        """See Pending."""
        return True

    def wait(self, timeout: float) -> T:
        """See Pending."""
        return self.value


HOSTS_AGREE = 2
"""So many hosts must say the same of a replica before it believes it: one may lie."""


ALONE = {
    "nobody": "nobody else came to this round",
    "left over": "all others who came to this round had found partners",
    "late": "the others had met before this peer came",
    "shunned": "those who came take none of this peer's messages",
    "shuns": "this peer takes no messages of those who came",
    "refused": "no host of this round let this peer in",
    "unreachable": "no host of this round could be reached",
    "away": "the run's folder could not be reached",
    "slow link": "this replica's link is slower than the others', who would wait for it in every round",
}
"""Why a peer stays alone in a round: in a word, and as its events tell it."""


BESIDE = ", beside "
"""Is in the key of what those exchange who have just met in a round: see ElasticNetwork.meet."""


@dataclass(frozen=True)
class Party:
    """Who takes part in a round, less than two when this replica stays alone, and each message's weight in the mean."""

    group: Group
    weights: dict[int, float]
    behind: bool = False
    """Whether this replica must catch up first, because its anchors are not the others'."""
    host: int | None = None
    """The member that has made the groups, and may lie."""
    seats: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """The seat of the process that keeps each cell, by the cell's name, of members that are islands with several."""
    alone: str = "nobody"
    """Why this replica stays alone, if it does: a word of ALONE."""


@dataclass(frozen=True)
class SharedState:
    """What a late replica downloads: float32 tensors by name, facts that JSON can hold, and afterwards who gave it.

    Of the tensors, those `beside` the core are not for replicas that hold the core only.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    givers: Group = ()
    beside: frozenset[str] = frozenset()


CORE_ONLY = "core_only"
"""The fact that a replica tells which holds the core of the model only."""


class Network(Protocol):
    """One replica's seat among the others. It moves packets and knows nothing of what is in them.

    A `key` names one exchange: every member of the group calls with the same key, once.

    Capabilities:
        elastic: itself, where replicas come and go.
        timed: itself, where its clock belongs to the run, and stops while the run does.
        processes: the ranks of the replicas in torch.distributed's process group, in order, where they are such
            processes; then `among` some of them there is a network, too.
        islands: itself, where replicas are several processes each.
        board: where replicas leave each other words, if there is such a place.
        worth_a_packet: bytes of a message that are worth a packet of their own, where each takes requests; else 0 or
            nothing at all.
        near: the network of the processes that are this replica together, where this one alone, or one of the others
            for it, is on this network.
    """

    rank: int
    traffic: Traffic

    @property
    def elastic(self) -> ElasticNetwork | None: ...  # noqa: D102

    @property
    def timed(self) -> TimedNetwork | None: ...  # noqa: D102

    @property
    def processes(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def islands(self) -> IslandNetwork | None: ...  # noqa: D102

    @property
    def board(self) -> Words | None: ...  # noqa: D102

    @property
    def near(self) -> Network | None: ...  # noqa: D102

    @property
    def worth_a_packet(self) -> int: ...  # noqa: D102

    def members(self) -> Group:
        """The replicas believed alive, sorted, this one among them."""

    def attachment(self) -> int:
        """The next number, from 0, for the keys of a session, so that they differ from others'."""

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """All-gather: sends a packet (flat uint8, any length) to the group; yields every member's, own included."""

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """Sends each member its packet, combines those received, and all-gathers the combined packets, own included.

        `combine` may run in another thread, once, while this replica trains; it is given the others' packets by rank.
        """

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """The mean over the group of a flat tensor, the same bits on every member.

        Works in place: `tensor` belongs to the network until the result, which is the same object, is there.
        After PeerLostError each of its elements holds either the mean or still this replica's own value.
        Each member sends 2 (n - 1) / n times the tensor's bytes.
        """

    def advance(self) -> None:
        """Advances a simulated clock by one inner step's computation; elsewhere time has passed by itself."""

    def now(self) -> float:
        """Seconds on this network's clock, wall or virtual."""


class TimedNetwork(Network, Protocol):
    """A network whose clock belongs to the run: a resumed run continues at the time of its checkpoint."""

    def clock(self) -> dict[str, float]:
        """This replica's time on the network's clock, as a checkpoint keeps it."""

    def resume(self, clock: Mapping[str, float]) -> None:
        """Waits until a time that `clock` gave; called once, before anything else."""


class DealingNetwork(Network, Protocol):
    """A network whose members can send each of the others a packet of its own. farflung's can; see `that_deals`."""

    def all_to_all(self, packets: Packets, group: Group, key: str) -> Pending[Packets]:
        """Sends each of the others its packet; yields what they have sent here, by their ranks. Own ones stay away."""


def name_of(network: Network, rank: int) -> str:
    """A replica's name in messages; networks of real machines have an `address`, which says where it is."""
    address = getattr(network, "address", None)
    return str(address(rank)) if address else f"replica {rank}"


def seats_of(network: Network) -> Group:
    """All replicas of a run, also those that are away; simulated networks have `seats`, on others members only are."""
    return getattr(network, "seats", None) or network.members()


def that_deals(network: Network, whose: str) -> DealingNetwork:
    """The network, where it can do what something of that name needs. Raises UserError."""
    if not hasattr(network, "all_to_all"):
        raise UserError(
            f"{whose} needs a network that has all_to_all, and {network!r} lacks it; add it, or take another"
        )
    return cast(DealingNetwork, network)


class IslandNetwork(Network, Protocol):
    """A network of processes, of which each island of several is a replica.

    Its exchanges are between the processes at the same place in each island: islands are alike, or do not use them.
    """

    @property
    def island_processes(self) -> Sequence[Group]:
        """The processes of each replica."""

    def between(self, processes: Sequence[int]) -> Network:
        """The network of one process of each island, this one among them; its traffic counts here."""

    def everyone(self) -> Network:
        """The network of all processes, in which each is a replica."""


def by_island(islands: IslandNetwork, told: Iterable[T]) -> list[list[T]]:
    """What all processes tell, in order, by the island that they are of."""
    rest = iter(told)
    return [list(islice(rest, len(island))) for island in islands.island_processes]


class ElasticNetwork(Network, Protocol):
    """A network whose replicas come and go, train at speeds of their own, and cannot all be trusted."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Offences of others, counted by kind."""

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """Calls `then` with those who come to a round, in another thread while this replica trains; yields its result.

        Args:
            wanted: the group that the round's topology makes of the members. Members left alone find others. Where the
                key has BESIDE in it, all of them have met in a round, and come, however far they are.
            step: at which this replica's round starts.
            weight: of its message in the mean.
            lineage: equal for all messages that may be averaged; "" for any.
        """

    def paced(self, step: int, every: int, rate: float = 0.0) -> int:
        """The step that a replica counts after its own `step`, with rounds each `every` steps.

        Slow replicas skip to the others' median step. Called at the end of each step. Where the clock makes them, they
        come at a `rate`, so many a second.
        """

    def keep(self, cells: Sequence[str], here: Collection[str]) -> None:
        """Says which cells the model has, in order, and which of them this process keeps. Raises PeerLostError."""

    def between(self, seats: Mapping[int, int]) -> Network:
        """The network of those that keep a cell: the seat of each replica, this one's among them."""

    @property
    def wanted(self) -> bool:
        """Whether a late replica asks for this one's state."""

    @property
    def keeps(self) -> bool:
        """Whether this replica's state is to be given with each checkpoint, to be kept where all may leave."""

    def give(self, state: SharedState) -> None:
        """Gives this replica's state to those who have asked, and to be kept."""

    def fetch(self, identical: bool) -> Pending[SharedState | None]:
        """The state of other replicas; where they are `identical`, of the same bits. `wait` raises PeerLostError."""

    def accept(self) -> None:
        """Says that a downloaded state was loaded; what is kept of it is not needed again."""

    def reject(self, state: SharedState, why: str) -> None:
        """Says that a downloaded state does not fit this run; its givers are not asked again."""

    def tell_others(self, **facts: float) -> None:
        """Publishes facts about this replica, for `farflung status`."""

    def others_told(self, fact: str) -> list[float]:
        """What the other members have told of a fact; those that have."""

    def telling(self, fact: str) -> Group:
        """The members that tell of a fact, this one perhaps among them."""

    def blame(self, rank: int, why: str) -> None:
        """Reports an offence of a replica."""


def packet_of(words: bytes) -> Tensor:
    """A packet of these bytes, at least one."""
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def words_of(packet: Tensor) -> bytes:
    """The bytes of a packet, on whatever device."""
    return packet.cpu().numpy().tobytes()


def fact_packet(value: Any) -> Tensor:
    """A packet of a value that JSON can hold."""
    return packet_of(json.dumps(value).encode())


def fact_in(packet: Tensor) -> Any:
    """The value of a `fact_packet`."""
    return json.loads(words_of(packet))


def mean_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of `tensors`, summed in the order given: the one order that every network uses, for equal bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.div_(len(tensors))
