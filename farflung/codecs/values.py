"""Sizes of values, from the smallest to those that leave float32's range."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farflung.errors import UserError

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_floating(tensors: Sequence[Tensor]) -> None:
    """Raises UserError for tensors that no codec can carry."""
    for tensor in tensors:
        if tensor.dtype not in FLOATING:
            raise UserError(f"a message holds a tensor of {tensor.dtype}; codecs carry {', '.join(map(str, FLOATING))}")


def norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm of all values together."""
    sizes = [torch.linalg.vector_norm(tensor).float() for tensor in tensors]
    size = math.hypot(*(torch.stack(sizes).cpu().tolist() if sizes else ()))  # another device is waited for once
    if math.isfinite(size):
        return size
    # Squares of large values leave float32's range.
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in tensors))


def finite(*tensors: Tensor) -> bool:
    """Whether no value is infinite or NaN, in one pass and without temporaries of the tensors' sizes.

    On another device it waits for that once, not for each tensor.
    """
    # One value that is not finite makes a sum that is not; a finite sum, at a fifth of the time, settles it.
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).float() for tensor in tensors]
    if not sums or torch.isfinite(torch.stack(sums)).all():
        return True
    return all(bool(torch.isfinite(torch.stack(t.aminmax())).all()) for t in tensors if t.numel())


def unscaled(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The tensor with a largest magnitude of 1, and what it was divided by: sums of huge values would overflow."""
    largest = tensor.abs().amax() if tensor.numel() else tensor.new_zeros(())
    scale = torch.where(largest > 0, largest, 1)
    return tensor / scale, scale


def rescaled(tensor: Tensor, scale: Tensor) -> Tensor:
    """The product with a scale, in place; what leaves float32's range becomes the largest number."""
    most = torch.finfo(torch.float32).max
    return tensor.mul_(scale).clamp_(-most, most)


def fit(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`; what is beyond its range becomes its largest number."""
    if tensor.dtype == dtype:
        return tensor
    most = torch.finfo(dtype).max
    return tensor.to(dtype) if most > torch.finfo(tensor.dtype).max else tensor.clamp(-most, most).to(dtype)
