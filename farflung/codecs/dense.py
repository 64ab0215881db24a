"""Every value as it is, or rounded to a smaller float."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.codecs.base import Traits
from farflung.codecs.flat import FlatTransform, count_of, expected
from farflung.codecs.names import Name
from farflung.errors import UserError


@dataclass(frozen=True)
class Dense(FlatTransform):
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

    def outline_flat(self, numel: int) -> list[Tensor]:
        """See FlatTransform."""
        return [torch.empty(numel, dtype=self.dtype, device="meta")]

    def forward_flat(self, flat: Tensor) -> list[Tensor]:
        """One part, in `dtype`."""
        most = torch.finfo(self.dtype).max
        return [flat.clamp(-most, most).to(self.dtype) if self.dtype != flat.dtype else flat]

    def inverse_flat(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
        """See FlatTransform; a new tensor, never a view of the packet."""
        # What a later transform gives back is float32.
        dtype = torch.float32 if parts and parts[0].dtype == torch.float32 else self.dtype
        (values,) = expected(parts, (dtype, count_of(like)))
        return values.to(torch.float32, copy=True)


NAME = Name(
    pattern="(float32|bfloat16|float16)",
    make=lambda dtype: Dense(getattr(torch, dtype)),
    examples=("float32", "bfloat16", "float16"),
    travels="every value as it is, or rounded to 16 bits",
)
