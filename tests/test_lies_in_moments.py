"""What one that lies in moments can do to the others, and what newcomers believe of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from problem import inner_steps, small_model
from test_companions import EVERY, adamw, averaged, kept_by
from torch import Tensor

from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import AveragedMoments
from farflung.outer.averaging import Averaging
from farflung.outer.columns import Message

BOTH = averaged(AveragedMoments((("exp_avg", 1), ("exp_avg_sq", 1))))
Lie = Callable[[Tensor, Tensor, Tensor], None]
"""Changes the first moments, the squares and the steps of a cell in place."""


@contextmanager
def lying(rank: int, lie: Lie) -> Iterator[None]:
    """Within, a replica lies in all messages of moments."""
    tell = Averaging.start_parts

    def told(self: Averaging, parts: Any, meetings: Any) -> Any:
        for part in parts if self._rank == rank and "moments" in meetings[0].key else ():
            _change(part, lie)
        return tell(self, parts, meetings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Averaging, "start_parts", told)
        yield


def _change(message: Message, lie: Lie) -> None:
    for *moments, steps in message.cells.values():
        half = len(moments) // 2
        for first, square in zip(moments[:half], moments[half:], strict=True):
            lie(first, square, steps)


LIES: dict[str, Lie] = {
    "negative squares": lambda first, square, steps: square.mul_(-5),
    "squares that leave nothing": lambda first, square, steps: square.mul_(-1.999),
    "negative steps": lambda first, square, steps: steps.fill_(-1e5 * 2.0**-30),
    "no steps": lambda first, square, steps: steps.zero_(),
    "endless steps": lambda first, square, steps: steps.fill_(3e38),
}


@pytest.mark.parametrize("kind", LIES)
def test_no_lie_spoils_others_weights_or_steps(kind: str) -> None:
    """Squares and steps are never negative, so that their mean is at least a replica's own share of it."""

    def work(network: SimulatedNetwork) -> tuple[list[str], dict[str, Tensor]]:
        model, outcomes = small_model(), list[str]()
        optimizer = adamw(model)
        with BOTH.attach(model, optimizer, network, on_round=lambda round: outcomes.append(round.outcome)):
            inner_steps(model, optimizer, network.rank, range(3 * EVERY))
            before = kept_by(optimizer)
            inner_steps(model, optimizer, network.rank, range(3 * EVERY, 4 * EVERY))
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        return outcomes, {name: value / before[name] for name, value in kept_by(optimizer).items()}

    with lying(2, LIES[kind]):
        one, other, _ = Simulation(3).run(work)
    for outcomes, grown in (one, other):
        assert outcomes == ["averaged"] * 4
        for name, times in grown.items():
            if name.startswith(("exp_avg_sq", "step")):
                assert torch.isfinite(times).all() and (times > 0.3).all(), name
