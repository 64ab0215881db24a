"""Sparse gradients of embeddings: they are averaged like others where a codec sends only their rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from farflung.codecs import Codec
from farflung.errors import UserError
from farflung.hooks.embedded import KINDS


def sparse_names(model: nn.Module, named: Mapping[str, nn.Parameter], codec: Codec) -> set[str]:
    """Those of some parameters whose gradients are sparse.

    Raises UserError where there are such and a codec would send whole tables of noughts.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, KINDS) and module.sparse]
    found = {name for name, parameter in named.items() if any(parameter is table for table in tables)}
    if found and not codec.traits.omits_zeros:
        raise UserError(
            f"{min(found)} has sparse gradients, of which {codec!r} would send the whole table; take codec='rows', "
            "make the embedding with sparse=False, or use diloco"
        )
    return found


def dense(gradient: Tensor) -> Tensor:
    """The gradient with its noughts."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def rows_of(gradient: Tensor) -> Tensor:
    """The gradient (rows, …) as a sparse one of those rows that are not all noughts."""
    rows = gradient.flatten(1).any(dim=1).nonzero().view(-1)
    return torch.sparse_coo_tensor(
        rows[None], gradient[rows], gradient.shape, check_invariants=False, is_coalesced=True
    )
