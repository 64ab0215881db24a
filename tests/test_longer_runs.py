"""Runs that go on with more steps than they were begun with: what changes over a run's length goes by the new one."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import inner_steps, small_model
from processes import saved, simulated_run

from farflung import methods
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork
from farflung.outer import Round, Schedule


def test_rounds_that_come_to_be_rarer_do_so_over_the_longer_run() -> None:
    def work(schedule: Schedule, steps: range, state: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        model, rounds = small_model(), list[Round]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = replace(methods.diloco(), schedule=schedule)
        with method.attach(model, optimizer, SimulatedNetwork.alone(), on_round=rounds.append) as outer:
            if state:
                outer.load_state_dict(state)
            inner_steps(model, optimizer, 0, steps)
            return [round.step for round in rounds], copy.deepcopy(outer.state_dict())

    begun = Schedule(2, final=8, steps=12)
    first, state = work(begun, range(12), {})
    assert first == [2, 5, 9]
    longer, _ = work(replace(begun, steps=48), range(12, 48), state)
    assert longer[:3] == [15, 18, 21]
    with pytest.raises(UserError, match="saved with another schedule: final: 8, not 9; attach that"):
        work(replace(begun, final=9), range(12, 13), state)


def test_a_run_whose_rounds_and_momentum_change_goes_on_with_more_steps(tmp_path: Path) -> None:
    changing: dict[str, Any] = {"every": 2, "every_final": 4, "outer_momentum_final": 0.1, "outer_momentum_warmup": 3}
    simulated_run(tmp_path, steps=6, method="diloco", **changing)
    simulated_run(tmp_path, steps=9, resume=True, method="diloco", **changing)
    assert saved(tmp_path, 9, 0)["outer"]["step"] == 9


@pytest.mark.parametrize(("steps", "count"), [(13, 2), (15, 3), (21, 3), (24, 4)])
def test_the_tail_is_that_of_the_longer_run(tmp_path: Path, steps: int, count: int) -> None:
    """Of rounds after steps 3, 6, 9 …, those of the last half; what was averaged with earlier ones is not used."""
    more: dict[str, Any] = {"every": 3, "tail_average": 0.5}
    simulated_run(tmp_path, steps=12, method="diloco", **more)
    assert saved(tmp_path, 12, 0)["late"]["count"] == 2
    simulated_run(tmp_path, steps=steps, resume=True, method="diloco", **more)
    assert saved(tmp_path, steps, 0)["late"]["count"] == count
