"""Averages among the replicas that are left, at the end of rounds and for evaluations; who is lost is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from farflung.hooks.buffers import average, real_view
from farflung.networks import Group, Network, among_replicas_left
from farflung.networks.torchrun import log
from farflung.outer.columns import Columns, Message
from farflung.outer.fragments import Fragment

T = TypeVar("T")


class ThoseLeft:
    """The replicas of a network that are left.

    Args:
        network: of all replicas.
        seconds: that each wait takes, at most.
    """

    def __init__(self, network: Network, seconds: float) -> None:
        self._network = network
        self._seconds = seconds
        self._told: Group = ()
        self._everyone = network.members()

    def average(self, tensors: Mapping[str, Tensor], key: str) -> None:
        """See `average` of buffers, with `directions`. Raises PeerLostError and UserError."""
        before = {name: real_view(tensor).clone() for name, tensor in tensors.items()}

        def work(group: Group) -> None:
            for name, values in before.items():
                if not (view := real_view(tensors[name])).equal(values):  # somebody was lost on the way
                    view.copy_(values)
            average(tensors, self._network, group, f"{key} of {group}", self._seconds, directions=True)

        self._ended(work, key)

    def mean(self, fragment: Fragment, columns: Columns, key: str) -> Tensor:
        """The mean of their weights, as a message of the fragment. Raises PeerLostError."""

        def work(group: Group) -> Message:
            message = fragment.message(fragment.read())
            for column in columns.of(group, message.names):
                named = {f"{cell} {n}": one for cell in column.cells for n, one in enumerate(message.cells[cell])}
                average(named, column.network, group, column.key(f"{key} of {group}"), self._seconds)
            return message

        return self._ended(work, key).flat

    def _ended(self, work: Callable[[Group], T], key: str) -> T:
        """What some work comes to among them; tells once who is lost."""
        group, result = among_replicas_left(self._network, work, self._seconds, f"{key}, those left")
        lost = tuple(sorted(set(self._everyone) - set(group)))
        if lost and lost != self._told:
            self._told, named = lost, ", ".join(map(str, lost))
            log.warning("replica %d averages without those that are lost: %s", self._network.rank, named)
        return result
