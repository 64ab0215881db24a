"""A small training problem that a replica on any network can work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farflung.methods import Method
from farflung.networks import Network
from farflung.outer import Attached, Round


@dataclass
class Result:
    """What one replica ended with."""

    weights: Tensor
    rounds: list[Round]
    outer: Attached


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of float32 data that is a pure function of rank and step."""
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


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
