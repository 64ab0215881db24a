"""What inner optimizers keep of each parameter, averaged at rhythms of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.buffers import average
from farflung.networks import PeerLostError
from farflung.outer.companions.base import Along
from farflung.outer.outcomes import Outcome

if TYPE_CHECKING:
    from farflung.outer.fragments import Weights
    from farflung.outer.loop import OuterLoop
    from farflung.outer.outcomes import Result
    from farflung.outer.round import Sync


@dataclass(frozen=True)
class AveragedMoments:
    """Averages what inner optimizers keep, each kind at every so-many-th round (DES-LOC, arXiv 2505.22549).

    A moment forgets slowly or fast, and need not be averaged more often than it does. What is averaged travels as
    float32 among those who held the round, which wait for it. A replica whose moments are not finite takes the others'.

    Args:
        rhythms: kinds of state by their names, such as exp_avg, and the rounds from one average to the next.
    """

    rhythms: tuple[tuple[str, int], ...]
    sends_more = True

    def __post_init__(self) -> None:
        if bad := [(name, rounds) for name, rounds in self.rhythms if rounds < 1]:
            raise UserError(f"{bad[0][0]} is to be averaged each {bad[0][1]} rounds; choose at least 1")

    def along(self, loop: OuterLoop) -> Along:
        """See Companion."""
        return Averaging(loop, dict(self.rhythms))


class Averaging(Along):
    """One loop's moments."""

    def __init__(self, loop: OuterLoop, rhythms: dict[str, int]) -> None:
        self._loop = loop
        self._rhythms = rhythms

    def after(self, sync: Sync[Tensor], weights: Weights, result: Result) -> None:
        """Averages what is due after this round."""
        loop, number = self._loop, sync.rounds - 1
        group = tuple(rank for rank in result.group if rank not in result.missing)
        if loop.columns.unlike:
            raise UserError(
                "islands of unlike layouts cannot average what inner optimizers keep; choose another method"
            )
        if not (moments := dict(self._due(number, weights))) or len(group) < 2:
            return
        key = loop.key(f"moments of round {number}, fragment {sync.index}")
        try:
            average(moments, loop.network, group, key, loop.deadline_s)
        except PeerLostError as lost:
            result.note(Outcome.PEER_LOST, str(lost))

    def _due(self, number: int, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for optimizer in self._loop.trained.optimizers:
            for name, parameter in weights.fragment.named.items():
                kept = optimizer.state.get(parameter, {})
                for kind, rounds in self._rhythms.items():
                    if number % rounds == 0 and kind in kept:
                        yield f"{kind} of {name}", kept[kind]
