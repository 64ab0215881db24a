"""The end of a run of processes, when some of them are lost: islands end as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from farflung.networks import Group, Network, TorchNetwork, among_survivors
from farflung.pipeline import Layout
from farflung.training.finish import PATIENCE, Ended


def ended_together(ended: Callable[[Network], Ended], network: TorchNetwork, layout: Layout, deadline: float) -> Ended:
    """What `ended` yields among the replicas all of whose processes are left. Raises PeerLostError.

    Args:
        ended: called by every process with the network of those that hold the same part of these replicas.
        network: that of all processes.
        layout: which of them is what.
        deadline: of the run, in seconds.
    """
    own = layout.place(network.process)

    def whole(processes: Group) -> Group:
        return tuple(p for p in processes if set(layout.island_of(layout.place(p))) <= set(processes))

    def work(processes: Group) -> Ended:
        return ended(network.among([process for process in layout.peers(own) if process in processes]))

    return among_survivors(network, whole, work, PATIENCE * deadline)[1]
