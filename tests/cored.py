"""Small decoders with a core, and replicas that train them, some the core alone; also one in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from patience import patience
from subnet import EVERY, LR, STEPS, decoder, loss_of
from torch import Tensor

from farflung import methods
from farflung.joint.kinds import core_named
from farflung.joint.maps import reduce_to_core, set_whole
from farflung.methods import Method
from farflung.networks import Network, TorchNetwork
from farflung.outer.holders import Holders

WEAK = (2, 3)
KINDS = ("lowrank2", "heads4")

METHODS: dict[str, Callable[[], Method]] = {
    "diloco": lambda: methods.diloco(every=EVERY),
    "diloco int8": lambda: methods.diloco(every=EVERY, codec="int8"),
    "diloco ef-topk20": lambda: methods.diloco(every=EVERY, codec="ef-topk20"),
    "diloco in fragments, later": lambda: methods.diloco(every=EVERY, fragments=2, delay=1),
    "noloco": lambda: methods.noloco(every=EVERY),
    "noloco int4": lambda: methods.noloco(every=EVERY, codec="int4"),
}


def joint(kind: str, alone: bool = False, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The decoder of subnet.py with a core, or that alone: the same first values in both."""
    model = decoder(dtype, **{"num_hidden_layers": 2} | settings)
    core_named(kind).divide(model)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random, dtype=dtype))
    if alone:
        reduce_to_core(model)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    """The core's steps and those of all in turn; at the end, the model is whole."""
    for step in steps:
        set_whole(model, step % 2 == 1)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    set_whole(model, True)


def replica(
    kind: str, name: str, weak: tuple[int, ...] = WEAK, rest_every: int = 1
) -> Callable[[Network], dict[str, Tensor]]:
    """What AdamW in float32 comes to on one replica."""

    def work(network: Network) -> dict[str, Tensor]:
        model = joint(kind, network.rank in weak)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with METHODS[name]().attach(model, optimizer, network, holders=Holders(weak, rest_every)):
            train(model, optimizer, network.rank, range(STEPS))
        return {key: values.clone() for key, values in model.state_dict().items()}

    return work


__all__ = ["EVERY", "KINDS", "LR", "METHODS", "STEPS", "WEAK", "joint", "replica", "train"]

if __name__ == "__main__":
    names, _, out = sys.argv[1:4]
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=patience(20))
    observed = {one: replica(KINDS[0], one)(network) for one in names.split(",")}
    torch.save(observed, Path(out) / f"{network.rank}.pt")
    os._exit(0)  # a process group that others may still be using is not taken apart
