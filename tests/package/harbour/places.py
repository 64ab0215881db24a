"""A codec: each value to some places after the point, in two bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs import Name, Transform


@dataclass(frozen=True)
class Places(Transform):
    """Each value times 10 to the power of `digits`, as a whole number of 16 bits."""

    digits: int = 3

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._whole(tensor) for tensor in tensors]

    def _whole(self, tensor: Tensor) -> Tensor:
        return (tensor * 10**self.digits).round().clamp(-32767, 32767).to(torch.int16).view(torch.uint8).flatten()

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        values = (part.view(torch.int16).to(torch.float32) / 10**self.digits for part in parts)
        return [value.view(one.shape) for value, one in zip(values, like, strict=True)]

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty(2 * one.numel(), dtype=torch.uint8, device="meta") for one in like]


NAME = Name(
    pattern="places([1-4])",
    make=lambda digits: Places(int(digits)),
    examples=("places2", "places3"),
    travels="each value to so many places after the point",
)
