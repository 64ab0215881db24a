"""An exchange of simulated replicas, as the one who waits for it sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from farflung.networks.base import PeerLostError, told_fates
from farflung.networks.simulator.cluster import CUT_OFF, SimulatedCollective
from farflung.networks.transfer import GONE

if TYPE_CHECKING:
    from farflung.networks.simulator.network import SimulatedNetwork

T = TypeVar("T")


class SimulatedPending(Generic[T]):
    """An exchange on the virtual clock."""

    def __init__(
        self, network: SimulatedNetwork, collective: SimulatedCollective, collect: Callable[[SimulatedCollective], T]
    ) -> None:
        self._network = network
        self._collective = collective
        self._collect = collect
        self.finished_at = math.inf

    def done(self) -> bool:
        """See Pending."""
        return self._collective.settled

    def wait(self, timeout: float) -> T:
        """See Pending."""
        network, collective = self._network, self._collective
        began, gone = network.now(), GONE.get()
        if not (collective.settled or (gone and gone())):
            wake = partial(network.simulation.make_ready, network)
            deadline = network.simulation.cluster.clock.at(began + timeout, wake)
            wakers = (collective.waiting, network.simulation.topics.waiting)
            for waker in wakers:
                waker.append(wake)
            network.simulation.block(network)
            while not (collective.settled or network.now() >= began + timeout or (gone and gone())):
                network.simulation.block(network)  # a word has woken it, which changes nothing
            deadline.cancel()
            for waker in wakers:
                if wake in waker:
                    waker.remove(wake)  # or a late end of this one would wake the replica from another wait
        network.traffic.seconds_blocked += network.now() - began
        self.finished_at = min(collective.ended_at, network.now())
        if collective.ended_at > network.now():
            raise self._lost(timeout)
        return self._collect(collective)

    def _lost(self, timeout: float) -> PeerLostError:
        collective, own = self._collective, self._network.rank
        away = self._network.simulation.cluster.cut_off_from(own, collective.group)
        late = collective.lost or collective.missing()
        if collective.lost:
            lost = collective.lost_to(own)
        elif away or late:
            lost = dict.fromkeys(late, f"did not deliver within {timeout:g} s") | dict.fromkeys(away, CUT_OFF)
        else:
            others = [rank for rank in collective.group if rank != own]
            lost = dict.fromkeys(others, f"is still delivering after {timeout:g} s")
        brought = sorted(collective.brought.items()) if late else []
        delivered = {rank: packet for rank, packet in brought if isinstance(packet, Tensor) and rank not in late}
        return PeerLostError(sorted(lost), told_fates(lost, " (simulated)"), delivered)
