"""One replica of a bench that times rounds: a model that costs nothing to train, and keeping in step."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from farflung.networks import Network, PeerLostError

SIDE = 500


def shapes(parameters: int) -> list[tuple[int, int]]:
    """Of the model's matrices."""
    return [(SIDE, SIDE)] * max(1, parameters // SIDE**2)


def model_of(parameters: int, rank: int, lr: float = 1e-4) -> tuple[nn.ParameterList, torch.optim.SGD]:
    """Square matrices, alike in all replicas, with gradients of each replica's own, so that they move apart."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes(parameters)])
    torch.manual_seed(rank)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def all_ready(network: Network, key: str, timeout_s: float = 120) -> None:
    """Waits until all replicas have come so far. Raises PeerLostError."""
    network.exchange(torch.zeros(1, dtype=torch.uint8), network.members(), key).wait(timeout_s)


def leave(network: Network) -> None:
    """Waits for the others, which may still need this one's packets."""
    with contextlib.suppress(PeerLostError):
        all_ready(network, "leaving", 60)
