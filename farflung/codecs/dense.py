"""Every value as it is, or rounded to a smaller float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits
from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, count_of, expected, flatten, in_order
from farflung.codecs.values import fit
from farflung.errors import UserError


@dataclass(frozen=True)
class Dense(Transform):
    """Sends each value in `dtype`: float32 as it is, bfloat16 or float16 at half the bytes.

    Values beyond float16's range are sent as its largest.
    """

    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"Dense has dtype={self.dtype}; choose torch.float32, torch.bfloat16 or torch.float16")

    @property
    def traits(self) -> Traits:
        """See Codec."""
        return Traits(lossless=self.dtype == torch.float32)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One part, in `dtype`; and the bytes that an earlier transform has finished."""
        floating, finished = by_kind(tensors)
        return [fit(flatten(floating), self.dtype), *finished]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform; new tensors, never views of the packet."""
        floating, finished = by_kind(like)
        # What a later transform gives back is float32.
        dtype = torch.float32 if parts and parts[0].dtype == torch.float32 else self.dtype
        (values,) = expected(parts[: len(parts) - len(finished)], (dtype, count_of(floating)))
        pieces = torch.split(values.to(torch.float32, copy=True), [tensor.numel() for tensor in floating])
        return in_order(pieces, parts[1:], like)


NAME = Name(
    pattern="(float32|bfloat16|float16)",
    make=lambda dtype: Dense(getattr(torch, dtype)),
    examples=("float32", "bfloat16", "float16"),
    travels="every value as it is, or rounded to 16 bits",
)
