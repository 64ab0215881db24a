"""Generalised primal averaging, against AdamW, its equations, and replicas in a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problem import gone_on
from torch import Tensor, nn

from farflung import methods
from farflung.adamw import PrimalAveraging
from farflung.errors import UserError
from farflung.networks import SimulatedNetwork, Simulation
from farflung.outer import FastWeights, Method, Schedule
from farflung.settings import Settings
from farflung.training.cautions import of_observer

STEPS, EVERY, REPLICAS = 20, 4, 3
SETTINGS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
BETAS = (0.9, 0.95)
"""AdamW's, whose mean of gradients has no part in what is usual here, so that it is tested, too."""


def pull(theta: Any, step: int, rank: int = 0) -> Any:
    """A gradient that depends on where it is taken."""
    return theta * 0.5 + np.sin(np.arange(12).reshape(4, 3) + step + 7.0 * rank)


class Reference:
    """One replica in numpy."""

    def __init__(self, average: float, between: float) -> None:
        self.z = self.x = np.ones((4, 3))
        self.m, self.v, self.t = np.zeros((4, 3)), np.zeros((4, 3)), 0
        self.average, self.between = average, between

    @property
    def y(self) -> Any:
        return self.between * self.x + (1 - self.between) * self.z

    def step(self, rank: int) -> None:
        g, self.t = pull(self.y, self.t, rank), self.t + 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.95 * self.v + 0.05 * g**2
        d = self.m / (1 - 0.9**self.t) / (np.sqrt(self.v / (1 - 0.95**self.t)) + 1e-8)
        self.z = (1 - 0.05 * 0.1) * self.z - 0.05 * d
        self.x = self.average * self.x + (1 - self.average) * self.z


def trained(method: Method, make: Any, steps: int, replicas: int) -> list[Tensor]:
    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.Linear(3, 4, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = make(model.parameters())
        with method.attach(model, optimizer, network):
            for step in range(steps):
                model.weight.grad = torch.from_numpy(pull(model.weight.detach().numpy(), step, network.rank))
                optimizer.step()
        return model.weight.detach().clone()

    return Simulation(replicas).run(work)


def test_without_averages_it_is_adamw() -> None:
    own = trained(
        methods.local(), lambda p: PrimalAveraging(p, average=0.0, between=0.0, betas=BETAS, **SETTINGS), STEPS, 1
    )
    adamw = trained(methods.local(), lambda p: torch.optim.AdamW(p, betas=BETAS, **SETTINGS), STEPS, 1)
    torch.testing.assert_close(own, adamw)


@pytest.mark.parametrize("lr", [0.03, 0.1])
def test_weights_do_not_swing_where_those_of_adamw_come_to_rest(lr: float) -> None:
    """Two momenta of like lengths, one after the other, would turn each step against where it leads."""

    def end(make: Any) -> float:
        """What is left of a bowl of unlike curvatures, of which gradients are noisy."""
        weight, curvature = nn.Parameter(torch.ones(50)), torch.logspace(-2, 2, 50)
        optimizer, noise = make([weight], lr=lr, weight_decay=0.0), torch.Generator().manual_seed(0)
        for step in range(400):
            optimizer.param_groups[0]["lr"] = lr * (1 - step / 400)
            weight.grad = curvature * weight.detach() + 0.1 * torch.randn(50, generator=noise)
            optimizer.step()
        return float((curvature * weight.detach().square()).sum())

    assert end(PrimalAveraging) < 1.2 * end(lambda p, **own: torch.optim.AdamW(p, betas=BETAS, **own))


@pytest.mark.parametrize("steps", [STEPS, STEPS + 3])
def test_rounds_average_the_fast_weights_alone(steps: int) -> None:
    """z is the mean of all after each fourth step; x stays each replica's own, and the model shows what is between."""
    replicas = [Reference(0.9, 0.7) for _ in range(REPLICAS)]
    for step in range(steps):
        for rank, one in enumerate(replicas):
            one.step(rank)
        if (step + 1) % EVERY == 0:
            mean = np.mean([one.z for one in replicas], axis=0)
            for one in replicas:
                one.z = mean
    seen = trained(
        methods.gpa(every=EVERY),
        lambda p: PrimalAveraging(p, average=0.9, between=0.7, betas=BETAS, **SETTINGS),
        steps,
        REPLICAS,
    )
    for own, wanted in zip(seen, replicas, strict=True):
        np.testing.assert_allclose(own.numpy(), wanted.y, rtol=1e-5)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("at", [5, 8])
def test_it_goes_on_from_its_state_bit_for_bit(at: int) -> None:
    whole, parts = gone_on(lambda: methods.gpa(every=EVERY), at, STEPS, 2, PrimalAveraging)
    assert all(torch.equal(one, again) for (one, _), (again, _) in zip(whole, parts, strict=True))


def test_a_delay_is_refused_and_another_inner_optimizer_warned_of() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late = Method(Schedule(every=4, delay=2), outer=torch.optim.SGD, companions=(FastWeights(),))
    with pytest.raises(UserError, match="delay is 2, but fast weights are exchanged at once; give 0"):
        late.attach(model, optimizer, SimulatedNetwork.alone())
    with pytest.warns(UserWarning, match="published with PrimalAveraging, and is another one with SGD"):
        methods.gpa().attach(model, optimizer, SimulatedNetwork.alone())


def shifted(one: Reference, to: Any) -> None:
    """Moves all that a replica keeps by as much as what it shows is moved."""
    by = to - one.y
    one.z, one.x = one.z + by, one.x + by


@pytest.mark.parametrize("delay", [0, 2])
def test_rounds_of_other_methods_move_all_that_it_keeps(delay: int) -> None:
    """The weights that the model shows are made anew from these in each step, which would else undo the round."""
    replicas, at_start = [Reference(0.9, 0.7) for _ in range(REPLICAS)], [np.zeros(0)] * REPLICAS
    for step in range(1, STEPS + delay + 1):
        for rank, one in enumerate(replicas):
            one.step(rank)
        if step % EVERY == 0:
            at_start = [one.y for one in replicas]
        if step > delay and (step - delay) % EVERY == 0:
            for own, one in zip(at_start, replicas, strict=True):
                shifted(one, one.y - own + np.mean(at_start, axis=0))
    method = methods.diloco(every=EVERY, outer_lr=1.0, outer_momentum=0.0, delay=delay)

    def make(parameters: Any) -> PrimalAveraging:
        return PrimalAveraging(parameters, average=0.9, between=0.7, betas=BETAS, **SETTINGS)

    for own, wanted in zip(trained(method, make, STEPS + delay, REPLICAS), replicas, strict=True):
        np.testing.assert_allclose(own.numpy(), wanted.y, rtol=1e-5)


def test_steps_after_the_end_go_on_from_the_averaged_weights() -> None:
    replicas = [Reference(0.9, 0.7) for _ in range(2)]
    for step in range(EVERY + 2):
        for rank, one in enumerate(replicas):
            one.step(rank)
        if step + 1 == EVERY:
            mean = (replicas[0].z + replicas[1].z) / 2
            replicas[0].z = replicas[1].z = mean
    end = (replicas[0].y + replicas[1].y) / 2
    for rank, one in enumerate(replicas):
        shifted(one, end)
        one.step(rank)

    def work(network: SimulatedNetwork) -> Tensor:
        model = nn.Linear(3, 4, bias=False).double()
        nn.init.ones_(model.weight)
        optimizer = PrimalAveraging(model.parameters(), average=0.9, between=0.7, betas=BETAS, **SETTINGS)
        with methods.gpa(every=EVERY).attach(model, optimizer, network) as outer:
            for step in range(EVERY + 3):
                if step == EVERY + 2:
                    outer.finish(average_weights=True)
                model.weight.grad = torch.from_numpy(pull(model.weight.detach().numpy(), step, network.rank))
                optimizer.step()
        return model.weight.detach().clone()

    with pytest.warns(UserWarning, match="the rounds have ended"):
        for own, wanted in zip(Simulation(2).run(work), replicas, strict=True):
            np.testing.assert_allclose(own.numpy(), wanted.y, rtol=1e-5)


def test_an_observer_of_peers_is_told_that_it_judges_fast_weights() -> None:
    (told,) = of_observer(Settings.of(method="gpa", observe=True, network="internet"))
    assert told.startswith("peers of gpa hand on fast weights, which this observer judges; ")
    assert not of_observer(Settings.of(method="diloco", observe=True, network="internet"))
