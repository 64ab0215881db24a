"""What is under way on the internet network, while the replica trains."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from farflung.networks.base import Group, PeerLostError
from farflung.networks.internet.post import PacketLostError

if TYPE_CHECKING:
    from farflung.networks.internet.network import InternetNetwork

T = TypeVar("T")


class Transfer(Generic[T]):
    """Work under way in the swarm's thread, while the replica trains."""

    def __init__(
        self,
        network: InternetNetwork,
        group: Group,
        run: Callable[[Transfer[T]], Coroutine[Any, Any, T]],
    ) -> None:
        self.group = group
        self.others = [rank for rank in group if rank != network.rank]
        self.delivered: dict[int, Tensor] = {}
        self.lost: dict[int, str] = {}
        self.finished_at = float("inf")
        self.taken = False
        self._network = network
        self._result: Future[T] = network.swarm.submit(self._timed(run))

    def done(self) -> bool:
        """See Pending."""
        return self._result.done()

    def wait(self, timeout: float) -> T:
        """See Pending."""
        network, self.taken = self._network, True
        began = network.now()
        try:
            return self._result.result(timeout)
        except FutureTimeout:
            self.finished_at = network.now()
            late = [rank for rank in self.others if rank not in self.delivered]
            names = ", ".join(network.address(rank) for rank in late)
            raise PeerLostError(late, f"{names} did not deliver within {timeout:g} s", dict(self.delivered)) from None
        except PacketLostError as error:
            raise PeerLostError(self.others, str(error)) from error
        finally:
            if not getattr(network.background, "on", False):  # there, nobody's training waits
                network.traffic.seconds_blocked += network.now() - began

    def raise_if_lost(self) -> None:
        """Raises PeerLostError, naming them, if anybody was lost."""
        if self.lost:
            reasons = (f"{self._network.address(rank)}: {reason}" for rank, reason in sorted(self.lost.items()))
            raise PeerLostError(sorted(self.lost), f"lost {'; '.join(reasons)}", dict(self.delivered))

    async def _timed(self, run: Callable[[Transfer[T]], Coroutine[Any, Any, T]]) -> T:
        try:
            return await run(self)
        finally:
            self.finished_at = self._network.now()
