"""Batches, whatever they consist of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

Batch = Any
"""Some samples: a tensor, or a tuple, list, dict or dataclass of batches. Whatever else is in one stays as it is."""


def mapped(change: Callable[..., Any], *batches: Batch) -> Batch:
    """A batch like some that are alike, with `change(*parts)` in the place of each part that consists of no others."""
    first = batches[0]
    if hasattr(first, "to"):  # a tensor, or what moves its own, such as a packed sequence, which is a tuple
        return change(*batches)
    if isinstance(first, Mapping):
        return {key: mapped(change, *(batch[key] for batch in batches)) for key in first}
    if isinstance(first, list | tuple):
        parts = [mapped(change, *of_each) for of_each in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)  # by name, or one after another
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        changed = {name: mapped(change, *(getattr(batch, name) for batch in batches)) for name in names}
        return dataclasses.replace(first, **changed)
    return change(*batches)


def to(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device. The host does not wait for the copy from pinned memory to a GPU."""

    def moved(part: Any) -> Any:
        return part.to(device, non_blocking=device.type == "cuda") if hasattr(part, "to") else part

    return mapped(moved, batch)


def pinned(batch: Batch) -> Batch:
    """A batch in memory from which a GPU copies by itself."""
    return mapped(lambda part: part.pin_memory() if hasattr(part, "pin_memory") else part, batch)
