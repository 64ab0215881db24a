"""Which parameters of a model are tables of embeddings, most of whose rows a batch does not touch."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

KINDS = nn.Embedding, nn.EmbeddingBag
"""The modules whose weight is such a table."""


def table_names(model: nn.Module) -> Collection[str]:
    """The names of a model's tables. What one process has of a divided model tells those of the whole."""
    told: Collection[str] | None = getattr(model, "names_of_tables", None)
    if told is not None:
        return told
    tables = {id(module.weight) for module in model.modules() if isinstance(module, KINDS)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in tables}
