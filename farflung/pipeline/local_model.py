"""What one process trains: its own parameters of the model, as plain tensors under their names in the whole model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from farflung.hooks.layouts import Layout, is_sharded
from farflung.hooks.shards import own_of


class LocalModel(nn.Module):
    """The parameters that one process's optimizers and rounds see, and the buffers that its checkpoints hold.

    Sharded parameters appear as their local shards, which share their memory; others as they are. What another process
    owns is left out, such as the embeddings that a tied head copies. Each shard has all of the buffers.

    Args:
        parameters: whole or sharded, by their names in the whole model.
        layout: how the parameters lie in the replica.
        tables: the names of the whole model's tables of embeddings.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        layout: Layout,
        tables: Collection[str],
    ) -> None:
        super().__init__()
        self.layout = layout
        self.names_of_tables = tables
        self._origins = dict(parameters)
        local = {name: own_of(parameter) for name, parameter in parameters.items()}
        self._own = {
            name: nn.Parameter(tensor.detach()) if is_sharded(self._origins[name]) else self._origins[name]
            for name, tensor in local.items()
            if tensor.numel()  # with few rows, some shards get none
        }
        self._kept = dict(buffers)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """See Module."""
        yield from self._own.items()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """See Module."""
        yield from self._kept.items()

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """The parameters' values, and the buffers'."""
        return {name: tensor.detach() for name, tensor in (self._own | self._kept).items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Loads its own parameters and buffers."""
        for name, tensor in (self._own | self._kept).items():
            tensor.copy_(state_dict[name])

    @property
    def rows(self) -> dict[nn.Parameter, nn.Parameter]:
        """Of sharded parameters, the shards that are here."""
        return {self._origins[name]: own for name, own in self._own.items() if own is not self._origins[name]}

    def collect_gradients(self) -> None:
        """Gives local shards the gradients of the sharded parameters."""
        for name, parameter in self._own.items():
            origin = self._origins[name]
            if origin is not parameter:
                parameter.data = own_of(origin).detach()
                parameter.grad = None if origin.grad is None else own_of(origin.grad).detach()

    def drop_gradients(self) -> None:
        """Removes all gradients."""
        for parameter in (*self._own.values(), *self._origins.values()):
            parameter.grad = None


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a checkpoint."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
