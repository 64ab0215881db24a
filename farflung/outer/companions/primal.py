"""Rounds of the fast weights that inner optimizers of primal averaging keep beside the trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from farflung.adamw import AVERAGED, FAST, PrimalAveraging
from farflung.errors import UserError
from farflung.hooks.shards import own_of
from farflung.outer.companions.base import Added, Along

if TYPE_CHECKING:
    from farflung.cells import Cell
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.method import Method
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync


@dataclass(frozen=True)
class FastWeights:
    """Has rounds exchange the fast weights z of PrimalAveraging, and not those that the model shows (GPA).

    These lie between z and an average x, which stays each replica's own. For rounds that land in the step in which they
    start.
    """

    sends_more = False

    def added(self, method: Method, cells: Sequence[Cell]) -> Added | None:
        """See Companion: nothing."""
        return None

    def along(self, loop: OuterLoop) -> Along:
        """See Companion."""
        if loop.method.schedule.delay:
            raise UserError(f"delay is {loop.method.schedule.delay}, but fast weights are exchanged at once; give 0")
        return Swapping(loop)


class Swapping(Along):
    """One loop's fast weights, in the model's place while a round is held."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        loop.copies.others_move_them = True

    def before(self, sync: Sync[Tensor], weights: Weights) -> None:
        """Puts the fast weights into the model."""
        for shown, state, _ in self._kept(weights):
            shown.copy_(own_of(state[FAST]))

    def after(self, sync: Sync[Tensor], weights: Weights, round: int, result: Result) -> None:
        """Takes new ones from there, and puts back what lies between them and their average."""
        for shown, state, between in self._kept(weights):
            own_of(state[FAST]).copy_(shown)
            shown.copy_(torch.lerp(shown, own_of(state[AVERAGED]), between))

    def taken(self, sync: Sync[Tensor], weights: Weights) -> None:
        """See Along; the average begins anew at the others' fast weights."""
        for shown, state, _ in self._kept(weights):
            own_of(state[FAST]).copy_(shown)
            own_of(state[AVERAGED]).copy_(shown)

    def _kept(self, weights: Weights) -> Iterator[tuple[Tensor, dict[str, Any], float]]:
        """What the model shows of each parameter, what is kept of it, and how near to the average it is shown."""
        here = set(weights.fragment.parameters)
        averaging = (one for one in self._loop.trained.optimizers if isinstance(one, PrimalAveraging))
        for optimizer, group in ((one, group) for one in averaging for group in one.param_groups):
            for parameter in group["params"]:
                if parameter in here and optimizer.state[parameter]:
                    yield own_of(parameter.detach()), optimizer.state[parameter], group["between"]
