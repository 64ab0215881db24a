"""Making one process's part of a replica."""

from __future__ import annotations

from typing import Any

import torch

from farflung.config import Config
from farflung.networks import Network, TorchNetwork
from farflung.pipeline.island import Alone, Island
from farflung.pipeline.layout import Layout
from farflung.workloads import models
from farflung.workloads.data import Data
from farflung.workloads.tokenizers import Tokenizer


def assemble(
    config: Config, tokenizer: Tokenizer, data: Data, network: Network, device: torch.device
) -> tuple[Island, Network]:
    """This process's part of its replica, and the network on which it holds rounds. Raises UserError."""
    layout = Layout.of(config)
    if not isinstance(network, TorchNetwork) or (layout.island == 1 and not config.offload):
        model = training(models.build(config, tokenizer), config).to(device)
        models.check_causal(model)
        return Alone(config, model, data, network.rank, device), network
    from farflung.pipeline.build import part_of_island  # slow to import, and only islands need it

    island = part_of_island(config, tokenizer, data, network, device)
    return island, network.among(layout.peers(island.place))


def training(model: Any, config: Config) -> Any:
    """The model as it is while it trains."""
    if config.recompute:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return model.train()
