"""A small training problem that a replica on any network can work on."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farflung.methods import Method
from farflung.networks import Network, Simulation
from farflung.outer import Round, Session


@dataclass
class Result:
    """What one replica ended with."""

    weights: Tensor
    rounds: list[Round]
    outer: Session


_SEEDING = threading.Lock()
"""Peers of one process make their models in threads, which share what is seeded."""


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with _SEEDING:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of float32 data that is a pure function of rank and step."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def step_all(optimizers: list[torch.optim.Optimizer], loss: Callable[[], Any]) -> None:
    """One iteration of a user's plain loop, with a closure where the optimizer wants one."""

    def closure() -> Any:
        optimizers[0].zero_grad()
        value = loss()
        value.backward()
        return value

    if isinstance(optimizers[0], torch.optim.LBFGS):
        optimizers[0].step(closure)
        return
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss().backward()
    for optimizer in optimizers:
        optimizer.step()


class MeanLoss:
    """The mean of the losses of two replicas, whose gradient is the mean of theirs to the bit."""

    def __init__(self, model: nn.Module, step: int) -> None:
        self.model, self.step = model, step

    def backward(self) -> None:
        parameters = list(self.model.parameters())
        losses = [loss_of(self.model, rank, self.step) for rank in range(2)]
        each = [torch.autograd.grad(loss, parameters) for loss in losses]
        self.value = (losses[0].detach() + losses[1].detach()) / 2
        for parameter, one, other in zip(parameters, *each, strict=True):
            parameter.grad = (one + other) / 2

    def __float__(self) -> float:
        return float(self.value)


def inner_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """Trains on data that is a pure function of rank and step."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step)).to(dtype)
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def replica(make: Callable[[], Method], steps: int, dtype: torch.dtype = torch.float32) -> Callable[[Network], Result]:
    """The work of one replica: `steps` inner AdamW steps under a method."""

    def work(network: Network) -> Result:
        model = small_model(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rounds: list[Round] = []
        with make().attach(model, optimizer, network, on_round=rounds.append) as outer:
            inner_steps(model, optimizer, network.rank, range(steps))
        return Result(flat(model), rounds, outer)

    return work


def gone_on(
    make: Callable[[], Method],
    at: int,
    steps: int,
    replicas: int,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
    """The weights and rounds of replicas that train without a stop, and of those that go on from a file's states."""

    def work(network: Network, interrupted: bool) -> tuple[Tensor, int]:
        def begun() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
            model = small_model()
            optimizer = optimizer_of(model.parameters(), lr=1e-2)
            return model, optimizer, make().attach(model, optimizer, network)

        things, file = begun(), io.BytesIO()
        with things[2]:
            inner_steps(*things[:2], network.rank, range(at))
            torch.save([thing.state_dict() for thing in things], file)
            if not interrupted:
                inner_steps(*things[:2], network.rank, range(at, steps))
        if interrupted:
            file.seek(0)
            things = begun()
            with things[2]:
                for thing, state in zip(things, torch.load(file, weights_only=True), strict=True):
                    thing.load_state_dict(state)
                inner_steps(*things[:2], network.rank, range(at, steps))
        return flat(things[0]), things[2].rounds

    whole, parts = (Simulation(replicas).run(partial(work, interrupted=stops)) for stops in (False, True))
    return whole, parts


@dataclass
class Trained:
    """What came of a replica's training, after so many steps of its own."""

    weights: Tensor
    rounds: list[Round]
    steps: int


def trainer(make: Callable[[], Method], rounds: int, **options: Any) -> Callable[[Network], Trained]:
    """A replica that trains until it has had so many rounds."""

    def work(network: Network) -> Trained:
        model, ended = small_model(), list[Round]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = 0
        with make().attach(model, optimizer, network, on_round=ended.append, **options):
            while len(ended) < rounds:
                inner_steps(model, optimizer, network.rank, range(steps, steps + 1))
                steps += 1
        return Trained(flat(model), ended, steps)

    return work
