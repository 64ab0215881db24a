"""What replicas show to those who observe their run."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from farflung.networks import Group, Network, PeerLostError, Pending
from farflung.networks.base import Packets, packet_of
from farflung.settings import Settings


class Shown:
    """Shows the observers what a replica has after its rounds, all replicas in turn.

    Nobody waits for an observer: one that has not received what it was shown before gets nothing new meanwhile.

    Args:
        network: of the replicas and, after them, the observers.
        replicas: how many these are.
    """

    def __init__(self, network: Network, replicas: int, observers: Group, deadline_s: float) -> None:
        self._network, self._replicas, self._deadline_s = network, replicas, deadline_s
        self._sent = dict.fromkeys(observers, 0)
        self._pending: dict[int, Pending[Packets]] = {}

    @classmethod
    def of(cls, settings: Settings, network: Network) -> Shown | None:
        """Those of a run's observers on the network of all; None where there are none."""
        replicas, observers = settings.run.replicas, settings.run.observers
        ranks = tuple(range(replicas, replicas + observers))
        return cls(network, replicas, ranks, settings.network.deadline) if observers else None

    def after_round(self, number: int, step: int, model: nn.Module) -> None:
        """Sends the weights, where it is this replica's turn."""
        if number % self._replicas == self._network.rank:
            self._send([one for one in list(self._sent) if self._is_ready(one)], step, model, last=False)

    def at_the_end(self, step: int, model: nn.Module) -> None:
        """Sends the weights that the run ends with, after which no others come; one replica calls it."""
        self._send([one for one in list(self._sent) if self._arrived(one)], step, model, last=True)
        for observer in list(self._sent):
            self._arrived(observer)

    def _is_ready(self, observer: int) -> bool:
        return observer not in self._pending or (self._pending[observer].done() and self._arrived(observer))

    def _arrived(self, observer: int) -> bool:
        """Whether an observer has received what it was sent; waits for that, and gives up one that is gone."""
        if pending := self._pending.pop(observer, None):
            try:
                pending.wait(self._deadline_s)
            except PeerLostError:
                self._sent.pop(observer)
        return observer in self._sent

    def _send(self, observers: Sequence[int], step: int, model: nn.Module, last: bool) -> None:
        if not observers:
            return
        file = io.BytesIO()
        torch.save({"step": step, "last": last, "model": model.state_dict()}, file)
        packet = packet_of(file.getvalue())
        for observer in observers:
            self._sent[observer] += 1
            self._pending[observer] = meeting(self._network, packet, observer, self._sent[observer])


def meeting(network: Network, packet: Tensor, other: int, number: int) -> Pending[Packets]:
    """The next exchange of a replica and an observer, by its number."""
    group = (network.rank, other) if network.rank < other else (other, network.rank)
    return network.exchange(packet, group, f"observed {number} of {group}")
