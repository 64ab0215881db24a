"""Models under torch's DistributedDataParallel, which averages gradients of its own at every step."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farflung.networks import Network

SPANS = (
    "the model is under DistributedDataParallel, which averages gradients between replicas {replicas} at every step: "
    "rounds save nothing; attach the model itself, or give DistributedDataParallel a process_group of one replica's "
    "processes"
)


def warn_of_gradients_between_replicas(model: nn.Module, network: Network) -> None:
    """Warns where gradients would travel between replicas at each step, besides the rounds."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            group = set(dist.get_process_group_ranks(module.process_group))
            spanned = [rank for rank, process in enumerate(network.processes) if process in group]
            if len(spanned) > 1:
                named = f"{', '.join(map(str, spanned[:-1]))} and {spanned[-1]}"
                warnings.warn(SPANS.format(replicas=named), stacklevel=3)
