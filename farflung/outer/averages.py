"""What replicas average outside of rounds: buffers and weights, on demand and at the end; who is lost is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.buffers import average, real_view
from farflung.hooks.shards import own_of, reshard
from farflung.networks import Group, among_replicas_left
from farflung.networks.torchrun import log
from farflung.outer.schedules import Schedule

if TYPE_CHECKING:
    from farflung.outer.session import Session

T = TypeVar("T")

END_DEADLINES = 10
"""The end waits this many times the deadline: replicas that never met may be far apart in time."""


class Averages:
    """Averages a session's replicas on demand; all of them must call alike. Who comes and goes has nobody to end with.

    Replicas that are lost are left out. Its methods raise PeerLostError where the rest cannot be reached, and UserError
    where sizes differ.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0
        self._everyone = session.network.members()
        self._told_lost: Group = ()
        self.shared_by = self._everyone
        """Whose weights were averaged last."""
        self.settle: Callable[[Group], object] = lambda group: None
        """Is called with those whose weights are to be averaged, before they are; again, where there are fewer."""

    def buffers(self) -> None:
        """Gives all replicas the mean of their buffers, and of frozen weights that the loop moves."""
        session = self._session
        if session.network.elastic:
            return
        session.meet_islands()
        tensors = session.averaged_besides()
        if not session.trained.layout.total(torch.tensor([len(tensors)], dtype=torch.float64)):
            return
        before = {name: real_view(tensor).clone() for name, tensor in tensors.items()}
        key, seconds = self._next_key("buffers"), END_DEADLINES * session.deadline_s

        def work(group: Group) -> None:
            for name, values in before.items():
                if not (view := real_view(tensors[name])).equal(values):  # somebody was lost on the way
                    view.copy_(values)
            average(tensors, session.network, group, f"{key} of {group}", seconds, directions=True)

        self._among_those_left(work, key, seconds)

    def weights(self) -> None:
        """Gives all replicas the mean of their weights."""
        session = self._session
        if session.network.elastic:
            return
        reshard(session.trained.model)
        session.meet_islands()
        fragments = session.holders.fragments(session.trained.model, 1, session.trained.named)
        key, seconds = self._next_key("weights"), END_DEADLINES * session.deadline_s

        def work(group: Group) -> list[Tensor]:
            self.settle(group)
            messages = [fragment.message(fragment.read()) for fragment in fragments]
            for members, cells in session.holders.apart(messages, Schedule(), group).items():
                for column in session.columns.of(members, list(cells)):
                    named = {f"{cell} {n}": one for cell in column.cells for n, one in enumerate(cells[cell])}
                    average(named, column.network, members, column.key(f"{key} of {members}"), seconds)
            return [message.flat for message in messages]

        self.shared_by, means = self._among_those_left(work, key, seconds)
        for fragment, flat in zip(fragments, means, strict=True):
            fragment.write(flat)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """See Session.averaged_weights."""
        session = self._session
        if session.network.elastic:
            raise UserError(
                "peers on the internet come and go, so nobody has the mean of all; evaluate this replica's own weights"
            )
        reshard(session.trained.model)
        with torch.no_grad():
            shown = [*session.trained.parameters, *session.averaged_besides().values()]
            kept = [own_of(tensor.detach()).clone() for tensor in shown]
            self.weights()
            self.buffers()
        try:
            yield
        finally:
            reshard(session.trained.model)
            with torch.no_grad():
                for tensor, own in zip(shown, kept, strict=True):
                    own_of(tensor.detach()).copy_(own)

    def _next_key(self, what: str) -> str:
        self._count += 1
        return self._session.key(f"{what} {self._count}")

    def _among_those_left(self, work: Callable[[Group], T], key: str, seconds: float) -> tuple[Group, T]:
        """The replicas that are left, and what some work comes to among them; tells once who is lost."""
        network = self._session.network
        group, result = among_replicas_left(network, work, seconds, f"{key}, those left")
        lost = tuple(sorted(set(self._everyone) - set(group)))
        if lost and lost != self._told_lost:
            self._told_lost, named = lost, ", ".join(map(str, lost))
            log.warning("replica %d averages without those that are lost: %s", network.rank, named)
        return group, result
