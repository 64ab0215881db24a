"""A process of an island of which another is on an elastic network, and leads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from farflung.networks.base import (
    Combine,
    ElasticNetwork,
    Finished,
    Group,
    Network,
    Packets,
    Party,
    Pending,
    SharedState,
)
from farflung.networks.transfer import RealNetwork

T = TypeVar("T")


class FollowingNetwork(RealNetwork):
    """See Network and ElasticNetwork: here there is nobody else; what happens in rounds, the island's leader tells.

    Args:
        rank: the island's.
        near: of its processes.
    """

    islands = None
    processes: tuple[int, ...] = ()
    refused: Mapping[str, int] = {}

    def __init__(self, rank: int, near: Network) -> None:
        super().__init__()
        self.rank = rank
        self.near = near

    @property
    def elastic(self) -> ElasticNetwork:
        """See Network."""
        return self

    def expect_model(self, shapes: str, values: int) -> None:
        """Nothing: the leader announces it."""

    def members(self) -> Group:
        """See Network."""
        return (self.rank,)

    def exchange(self, packet: Tensor, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        return Finished({self.rank: packet}, self.now())

    def all_to_all(self, packets: Packets, group: Group, key: str) -> Pending[Packets]:
        """See Network."""
        return Finished({}, self.now())

    def scatter_combine_gather(self, packets: Packets, group: Group, key: str, combine: Combine) -> Pending[Packets]:
        """See Network."""
        return Finished({self.rank: combine({})}, self.now())

    def all_reduce(self, tensor: Tensor, group: Group, key: str) -> Pending[Tensor]:
        """See Network."""
        return Finished(tensor, self.now())

    def meet(
        self, wanted: Group, key: str, step: int, weight: float, lineage: str, then: Callable[[Party], T]
    ) -> Pending[T]:
        """See ElasticNetwork."""
        return Finished(then(Party((self.rank,), {self.rank: weight})), self.now())

    def paced(self, step: int, every: int, rate: float = 0.0) -> int:
        """See ElasticNetwork."""
        return step

    def keep(self, cells: Sequence[str], here: Collection[str]) -> None:
        """Nothing: the leader keeps all."""

    def between(self, seats: Mapping[int, int]) -> Network:
        """See ElasticNetwork."""
        return self

    @property
    def wanted(self) -> bool:
        """See ElasticNetwork; the leader is asked."""
        return False

    @property
    def keeps(self) -> bool:
        """See ElasticNetwork; the leader keeps it."""
        return False

    def give(self, state: SharedState) -> None:
        """Nothing: the leader gives it."""

    def fetch(self, identical: bool) -> Pending[SharedState | None]:
        """See ElasticNetwork; the leader fetches."""
        return Finished(None, self.now())

    def reject(self, state: SharedState, why: str) -> None:
        """Nothing: the leader says so."""

    def accept(self) -> None:
        """Nothing: the leader has it."""

    def tell_others(self, **facts: float) -> None:
        """Nothing: the leader says so."""

    def others_told(self, fact: str) -> list[float]:
        """Nothing: the leader hears it."""
        return []

    def telling(self, fact: str) -> Group:
        """Nothing: the leader hears it."""
        return ()

    def blame(self, rank: int, why: str) -> None:
        """Nothing: the leader says so."""
