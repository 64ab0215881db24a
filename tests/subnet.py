"""A small decoder whose units replicas deal out, and its training; also one replica in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from patience import patience
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from farflung import methods
from farflung.methods import Method
from farflung.networks import Network, TorchNetwork

EVERY, STEPS, LR = 3, 9, 0.3

METHODS: dict[str, Callable[[], Method]] = {
    "ist": lambda: methods.ist(every=EVERY),
    "ist in pairs": lambda: methods.ist(every=EVERY, group_size=2),
    "ist int8": lambda: methods.ist(every=EVERY, codec="int8"),
    "resist": lambda: methods.resist(every=EVERY),
}


def decoder(dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Four layers of eight heads in four groups, and of twelve FFN columns."""
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    more = {"intermediate_size": 12, "num_hidden_layers": 4, "vocab_size": 11, "attention_bias": True}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "attn_implementation": "eager"}
    model = LlamaForCausalLM(LlamaConfig(**shape | more | ends | settings)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def ids(rank: int, step: int) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    batch = ids(rank, step)
    logits = model(input_ids=batch, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def replica(name: str) -> Callable[[Network], dict[str, Tensor]]:
    """What AdamW in float32 comes to on one replica."""

    def work(network: Network) -> dict[str, Tensor]:
        model = decoder(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with METHODS[name]().attach(model, optimizer, network):
            train(model, optimizer, network.rank, range(STEPS))
        return {key: values.clone() for key, values in model.state_dict().items()}

    return work


if __name__ == "__main__":
    name, _, out = sys.argv[1:4]
    torch.set_num_threads(1)
    network = TorchNetwork.from_env(starting=patience(20))
    observed = {one: replica(one)(network) for one in name.split(",")}
    torch.save(observed, Path(out) / f"{network.rank}.pt")
    os._exit(0)  # a process group that others may still be using is not taken apart
