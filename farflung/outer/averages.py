"""What replicas average outside of rounds: buffers and weights, on demand and at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.buffers import average
from farflung.hooks.shards import own_of, reshard
from farflung.networks import Group, among_members
from farflung.outer.columns import Column
from farflung.outer.fragments import split

if TYPE_CHECKING:
    from farflung.outer.session import Session

END_DEADLINES = 10
"""The end waits this many times the deadline: replicas that never met may be far apart in time."""


class Averages:
    """Averages a session's replicas on demand; all of them must call alike. Who comes and goes has nobody to end with.

    Its methods raise PeerLostError, and UserError where sizes differ.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0

    def buffers(self) -> None:
        """Gives all replicas the mean of their buffers, and of frozen weights that the loop moves."""
        session = self._session
        if not session.network.elastic:
            session.meet_islands()
            column = Column(session.network, ())
            self._average(session.averaged_besides(), column, self._next_key("buffers"), directions=True)

    def weights(self) -> None:
        """Gives all replicas the mean of their weights."""
        session = self._session
        if session.network.elastic:
            return
        reshard(session.trained.model)
        session.meet_islands()
        key = self._next_key("weights")
        (fragment,) = split(session.trained.model, 1, session.trained.named)
        message = fragment.message(fragment.read())
        for column in session.columns.of(session.network.members(), message.names):
            named = {f"{cell} {n}": one for cell in column.cells for n, one in enumerate(message.cells[cell])}
            self._average(named, column, key, directions=False)
        fragment.write(message.flat)

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

    def _average(self, tensors: Mapping[str, Tensor], column: Column, key: str, directions: bool) -> None:
        network, seconds = column.network, END_DEADLINES * self._session.deadline_s

        def exchange(group: Group) -> None:
            average(tensors, network, group, f"{column.key(key)} of {group}", seconds, directions)

        among_members(network, exchange)
