"""Progress that is the same in every round arrives whole: in any precision, with any merge and delay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from farflung import methods
from farflung.methods import Method
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import Average, Everyone, Schedule

ULP = 2.0**-7
"""The distance of bfloat16 numbers from 1 to 2."""


def moved(
    method: Callable[[], Method], replicas: int, steps: int, gradient: Callable[[int, int], float], dtype: torch.dtype
) -> list[float]:
    """How far one weight of 1 has come on each replica, by plain steps of given lengths."""

    def work(network: SimulatedNetwork) -> float:
        model = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with method().attach(model, optimizer, network) as outer:
            for step in range(steps):
                model.weight.grad = torch.full_like(model.weight, -gradient(network.rank, step))
                optimizer.step()
        return float(outer.anchors[0]) - 1  # type: ignore[attr-defined]

    return Simulation(replicas).run(work)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [Average, lambda anchors: torch.optim.SGD(anchors, lr=1.0)])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_quarter_of_an_ulp_a_round_adds_up(
    outer: Callable[[list[Tensor]], torch.optim.Optimizer], delay: int
) -> None:
    """One of four replicas moves by one bfloat16 step in each round: 60 rounds are 15 steps."""
    method = lambda: Method(Schedule(every=2, delay=delay), Everyone(), outer=outer)  # noqa: E731
    seen = moved(method, 4, 120, lambda rank, step: ULP if rank == 1 and step % 2 == 0 else 0.0, torch.bfloat16)
    for distance in seen:
        assert distance / ULP == pytest.approx(15, abs=0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_pairs_lose_nothing_of_steps_below_an_ulp(dtype: torch.dtype) -> None:
    method = lambda: methods.noloco(every=1, outer_lr=1.0, outer_momentum=0.0)  # noqa: E731
    seen = moved(method, 2, 80, lambda rank, step: ULP if rank == 1 and step % 2 == 0 else 0.0, dtype)
    for distance in seen:
        assert distance / ULP == pytest.approx(20, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["kept", "dropped", "mixed", "eager"])
@pytest.mark.parametrize("delay", [0, 2, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_gamma_has_no_effect_among_equal_replicas(merge: str, delay: int, size: int) -> None:
    """Equal replicas' anchors are equal at any time, so nothing must pull them anywhere."""
    if (merge == "eager") != (delay == 4):
        return

    def run(gamma: float) -> list[float]:
        settings = {"outer_lr": 0.7, "outer_momentum": 0.5, "gamma": gamma, "group_size": size}
        method = lambda: methods.noloco(every=4, delay=delay, merge=merge, **settings)  # noqa: E731
        return moved(method, size, 200, lambda rank, step: 0.5, torch.float64)

    free, pulled = run(0.0), run(0.7)
    assert free[0] > 30
    assert pulled == pytest.approx(free, rel=1e-6)


def test_pairs_of_equal_replicas_move_as_far_as_one_alone_would() -> None:
    """v ← α·v + β·step; φ ← φ + v, of 4 × 0.5 a round, 50 rounds: the sum of a geometric series."""
    method = lambda: methods.noloco(every=4, delay=0, outer_momentum=0.5, outer_lr=0.7)  # noqa: E731
    velocity, position = 0.0, 0.0
    for _ in range(50):
        velocity = 0.5 * velocity + 0.7 * 2.0
        position += velocity
    assert moved(method, 2, 200, lambda rank, step: 0.5, torch.float64) == pytest.approx([position] * 2, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("merge", ["kept", "eager"])
@pytest.mark.parametrize(("replicas", "size"), [(3, 2), (5, 3), (9, 4)])
@pytest.mark.parametrize("steps", [40, 43])
def test_a_step_counts_once_whoever_sits_out(merge: str, replicas: int, size: int, steps: int) -> None:
    """One replica makes one step of 1, at some time: all weights together have moved by 1 at the end."""
    for walker in range(0, steps, 3):

        def work(network: SimulatedNetwork, walker: int = walker) -> float:
            model = nn.Linear(1, 1, bias=False).double()
            nn.init.zeros_(model.weight)
            method = methods.noloco(
                every=4, delay=4, outer_lr=1.0, outer_momentum=0.0, gamma=0.5, group_size=size, merge=merge
            )
            with method.attach(model, optimizer := torch.optim.SGD(model.parameters(), lr=1.0), network):
                for step in range(steps):
                    walks = step == walker and network.rank == 1
                    model.weight.grad = torch.full_like(model.weight, -1.0 if walks else 0.0)
                    optimizer.step()
            return float(model.weight.detach())

        assert sum(Simulation(replicas).run(work)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("step", [1e-7, 1e-9, 1e-11])
@pytest.mark.parametrize("size", [2, 4])
def test_steps_far_below_float32_count_where_weights_are_float64(step: float, size: int) -> None:
    method = lambda: methods.noloco(every=5, outer_lr=1.0, outer_momentum=0.0, group_size=size)  # noqa: E731
    for distance in moved(method, 4, 40, lambda rank, number: step, torch.float64):
        assert distance / step == pytest.approx(40, rel=1e-3)
