"""Models sharded with FSDP2: which shard is here, and with whom rounds are possible."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.networks import Network


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this process may have a shard; then all that have some call this alike."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def own_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: a DTensor's local shard, else all. FSDP may replace it: ask each time."""
    to_local = getattr(tensor, "to_local", None)  # DTensor is slow to import, and few need it
    return to_local() if to_local else tensor


def reshard(model: nn.Module) -> None:
    """Frees what FSDP2 has gathered; a forward pass without gradients leaves its root so, of weights that may change.

    The model then shows its shards again, which are the parameters that optimizers hold. Not to be called within
    backward, which needs what is gathered.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; who has sharded a model has done so
    for module in model.modules():
        if fsdp and isinstance(module, fsdp.FSDPModule):
            module.reshard()


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """A context in which a module that FSDP2 shards shows its own parameters whole; all who have shards call it alike.

    Others are as they are.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not (fsdp and isinstance(module, fsdp.FSDPModule)):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def check_shards(model: nn.Module, network: Network) -> None:
    """Refuses to average different shards of one replica with each other. Raises UserError."""
    meshes = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    island = sorted({process for mesh in meshes if mesh is not None for process in mesh.mesh.flatten().tolist()})
    if len(island) < 2:
        return
    sharded = f"the model is sharded over processes {', '.join(map(str, island[:-1]))} and {island[-1]}"
    if network.elastic:
        raise UserError(
            f"{sharded}, and an elastic network cannot tell one shard from another; hold rounds over "
            "torch.distributed, or train a replica that one process has all of"
        )
    if len(set(network.processes) & set(island)) > 1:
        raise UserError(
            f"{sharded}, which are replicas of this network, too; "
            f"hold rounds between equal shards: network.among({_equal_shards(network, island)})"
        )


def _equal_shards(network: Network, island: list[int]) -> list[int]:
    """The processes that hold the same shard as this one, where islands are blocks of processes, or are dealt out."""
    own, size, stride = network.processes[network.rank], len(island), island[1] - island[0]
    if stride == 1:
        return [process for process in network.processes if process % size == own % size]
    return [process for process in network.processes if process // stride == own // stride]


def merged(parts: Iterable[tuple[int, Mapping[str, Tensor]]], undivided: Collection[str] = ()) -> dict[str, Tensor]:
    """Whole tensors by name, from parts of a model and the shards that they are.

    Single numbers and those that are named as `undivided` are whole in every shard.
    """
    found: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for shard, named in parts:
        for name, tensor in named.items():
            found[name][shard] = tensor
    return {
        name: torch.cat([tensor for _, tensor in sorted(shards.items())])
        if len(shards) > 1 and shards[min(shards)].dim() and name not in undivided
        else shards[min(shards)]
        for name, shards in found.items()
    }
