"""An outer momentum that rises and falls, against Nesterov's formula by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from problem import replica
from torch import Tensor, nn

from farflung import methods
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import DisagreementError, Method, MomentumSchedule, Schedule
from farflung.outer.optimizers import after_a_step
from farflung.settings import Settings


def test_it_rises_along_a_line_and_falls_along_another() -> None:
    schedule = MomentumSchedule(highest=0.8, warmup=10, final=0.2, steps=40)
    seen = [schedule.at(step) for step in (0, 5, 10, 25, 40, 99)]
    assert seen == pytest.approx([0.0, 0.4, 0.8, 0.5, 0.2, 0.2])
    assert [MomentumSchedule(0.8, warmup=4).at(step) for step in (1, 4, 1000)] == pytest.approx([0.2, 0.8, 0.8])
    assert MomentumSchedule(0.8).at(0) == 0.8


@pytest.mark.parametrize(("delay", "highest", "warmup"), [(0, 0.8, 6), (1, 0.8, 6), (0, 0.0, None)])
def test_rounds_step_with_the_momentum_of_their_time(delay: int, highest: float, warmup: int | None) -> None:
    """Steps of 1 and of 3 in rounds of two: Δ is -4; buf ← μ·buf + Δ; φ ← φ - lr·(Δ + μ·buf)."""
    settings = {"method": "diloco", "every": 2, "delay": delay, "outer_lr": 0.5, "outer_momentum": highest}
    method = Settings.of(**settings, outer_momentum_warmup=warmup, outer_momentum_final=0.3, steps=20).method()
    assert method.outer and after_a_step(method.outer) == (1, {"momentum_buffer"})  # what newcomers expect of others

    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with method.attach(model, optimizer, network) as outer:
            for _ in range(20 + delay):
                model.weight.grad = torch.full_like(model.weight, -1.0 - 2 * network.rank)
                optimizer.step()
        return outer.anchors[0]  # type: ignore[attr-defined, no-any-return]

    position, buffer = 0.0, 0.0
    for landed in range(2 + delay, 21 + delay, 2):
        rises = warmup or 0
        fall = highest + (0.3 - highest) * min(1.0, (landed - rises) / (20 - rises))
        momentum = highest * landed / rises if landed < rises else fall
        buffer = momentum * buffer - 4.0
        position -= 0.5 * (-4.0 + momentum * buffer)
    assert float(Simulation(2).run(work)[0]) == pytest.approx(position, rel=1e-6)


def test_what_has_no_momentum_is_told_to_leave_it_out() -> None:
    chosen: list[tuple[str, dict[str, float]]] = [
        ("sparseloco", {"outer_momentum_final": 0.0}),
        ("ddp", {"outer_momentum_warmup": 3}),
    ]
    for name, setting in chosen:
        with pytest.raises(UserError, match=f"^{name} has no setting {min(setting)}; remove it"):
            Settings.of(method=name, **setting).method()
    for setting in ({"outer_momentum_final": 0.0}, {"outer_momentum_warmup": 3}):
        with pytest.raises(UserError, match=f"^{min(setting)} is .*but outer_momentum is 0 and stays so; give another"):
            Settings.of(method="diloco", outer_momentum=0.0, **setting).method()
    with pytest.raises(UserError, match="no outer optimizer; leave it out"):
        replace(methods.ddp(), momentum=MomentumSchedule(0.5))
    with pytest.raises(UserError, match="choose at least 0 and less than 1"):
        MomentumSchedule(1.0)
    with pytest.raises(UserError, match="warmup=-3; choose at least 0"):
        MomentumSchedule(0.5, warmup=-3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = Method(Schedule(every=2), outer=partial(torch.optim.Adam, lr=0.1), momentum=MomentumSchedule(0.5))
    method.attach(model, optimizer, SimulatedNetwork.alone())
    with pytest.raises(UserError, match="Adam has none; leave that out"):
        optimizer.step()


@pytest.mark.parametrize("part", [{"momentum": MomentumSchedule(0.5, warmup=3)}, {"fuse": "rda"}])
def test_replicas_of_unlike_parts_are_told_before_they_train(part: dict[str, Any]) -> None:
    def work(network: SimulatedNetwork) -> None:
        method = replace(methods.diloco(every=2), **part) if network.rank else methods.diloco(every=2)
        replica(lambda: method, 2)(network)

    with pytest.raises(DisagreementError, match=r"outer optimizer|way of averaging"):
        Simulation(2).run(work)
