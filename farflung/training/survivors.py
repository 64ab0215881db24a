"""The end of a run when some processes are lost: islands end as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable

from farflung.networks import Group, Network, TorchNetwork, among_survivors
from farflung.pipeline import Mesh
from farflung.training.finish import DEADLINES_AT_THE_END, Ended


def ended_together(ended: Callable[[Network], Ended], network: TorchNetwork, mesh: Mesh, deadline_s: float) -> Ended:
    """The result of `ended` among the replicas that have all of their processes. Raises PeerLostError.

    Args:
        ended: called by every process with the network of those that hold the same part of these replicas.
        network: that of all processes.
        mesh: which of them is what.
        deadline_s: of the run, in seconds.
    """
    own = mesh.coordinates(network.process)

    def whole(processes: Group) -> Group:
        return tuple(p for p in processes if set(mesh.island_group(mesh.coordinates(p))) <= set(processes))

    def work(processes: Group) -> Ended:
        return ended(network.among([process for process in mesh.data_parallel_group(own) if process in processes]))

    return among_survivors(network, whole, work, DEADLINES_AT_THE_END * deadline_s)[1]
