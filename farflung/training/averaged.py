"""The mean of the weights that replicas end with, made part by part: one that fills its memory has no room for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from farflung.memory.far import Home, MakeHome
from farflung.networks import Group, Network, among_members
from farflung.outer.columns import Columns
from farflung.outer.fragments import Fragment
from farflung.training.agreement import all_gather_facts
from farflung.training.measures import squares_apart

AT_ONCE = 1 << 24
"""Values that are averaged at a time."""


class Mean(NamedTuple):
    """The mean of some cells, which are written once all replicas have it; until then it lies where there is room.

    `apart` is the sum of the squares of what this replica's own weights differ from it by.
    """

    fragment: Fragment
    home: Home
    apart: float

    def write(self, device: torch.device) -> None:
        """Gives it to the model, which is on a device."""
        self.fragment.write(self.home.tensor.to(device))
        self.home.let_go()


class PartByPart:
    """Averages fragments over a network's replicas, in the same order on all of them.

    Args:
        fragments: the core of a model, or all of it, and the rest beside the core where this replica has that.
        home: makes what means lie in.
    """

    def __init__(self, network: Network, fragments: Sequence[Fragment], home: MakeHome, deadline_s: float) -> None:
        self._network, self._fragments, self._home, self._deadline_s = network, fragments, home, deadline_s
        self._columns = Columns(network)

    def means(self, cored: bool) -> list[Mean]:
        """The means of all parts; of what lies beside a core, of those who hold it. Raises PeerLostError."""
        self._columns.meet(self._fragments[0].names, [], "layouts at the end", self._deadline_s)
        held = {}
        if cored:
            held = all_gather_facts(self._network, len(self._fragments), "parts at the end", self._deadline_s)

        def averaged(members: Group) -> list[Mean]:
            found = []
            for number, fragment in enumerate(self._fragments):
                group = tuple(rank for rank in members if not held or held[rank] > number)
                # Of islands of unlike layouts, each would divide its cells otherwise.
                parts = [fragment] if self._columns.unlike else fragment.parts(AT_ONCE)
                found += [self._mean(part, group, f"average of {number}.{n}") for n, part in enumerate(parts)]
            return found

        return among_members(self._network, averaged)

    def _mean(self, fragment: Fragment, group: Group, key: str) -> Mean:
        own = fragment.message(fragment.read())
        home = self._home(own.flat)
        mean = own.like(home.tensor)
        for column in self._columns.of(group, own.names):
            part = own.part(column.cells)
            flat = part.flat.clone() if part is own else part.flat
            pending = column.network.all_reduce(flat, group, column.key(f"{key} of {group}"))
            mean.put(part.like(pending.wait(self._deadline_s)))
        apart = squares_apart(own.flat, home.tensor.to(own.flat.device))
        home.let_go()
        return Mean(fragment, home, apart)
