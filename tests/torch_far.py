"""One of three replicas whose gradients are far; the second dies while its host steps layers."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
from patience import patience
from test_far_gradients import CPU, Layered
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from farflung import inner, methods
from farflung.memory.copies import Threads
from farflung.memory.far import HostMemory, home_in
from farflung.memory.updates import FarUpdates
from farflung.networks import PeerLostError, TorchNetwork
from farflung.outer import mean_gradient

STEPS = 3


def die_within(step: int) -> None:
    """Ends the process when the host is to step the second layer in a step."""
    calls = 4 * step + 2  # in each step, of the whole optimizer and of three layers

    def count(*_: object) -> None:
        nonlocal calls
        calls -= 1
        if calls < 0:
            os._exit(1)

    register_optimizer_step_pre_hook(count)


def main(out: Path) -> None:
    network = TorchNetwork.from_env()
    mean_gradient.BLOCK = 1
    model = Layered()
    make = partial(inner.INNER["adamw"].make, lr=0.05)
    named = dict(model.named_parameters())
    optimizer = make(list(named.items()))
    layers = [{name: p for name, p in named.items() if f".{number}." in name} for number in range(3)]
    home, copies = partial(home_in, out), Threads(HostMemory(), CPU)
    if network.rank == 1:
        die_within(STEPS - 1)
    seen: list[dict[str, Tensor]] = []
    lost = False
    try:
        with methods.ddp().attach(model, optimizer, network, deadline_s=patience(20)) as session:
            updates = FarUpdates(optimizer, make, layers, home, copies, {})
            session.gradients_from(lambda: updates)
            for step in range(STEPS):
                seen.append({name: parameter.detach().clone() for name, parameter in named.items()})
                (model.loss(1, 2 * step + 1) * (1 + network.rank)).backward()  # all layers but the last have gradients
                optimizer.step()
                optimizer.zero_grad()
    except PeerLostError:
        lost = True
    seen.append({name: parameter.detach() for name, parameter in named.items()})
    torch.save((lost, seen), out / f"{network.rank}.pt")
    os._exit(0)  # a process group that others may still be using is not taken apart


if __name__ == "__main__":
    main(Path(sys.argv[3]))
