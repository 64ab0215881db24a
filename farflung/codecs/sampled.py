"""A random part of the values, the same on all replicas, another one in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits, share_of
from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, expected, in_order, joined
from farflung.errors import UserError

_ROUND_BYTES = torch.int64.itemsize


@dataclass
class Sampled(Transform):
    """Sends a share of each tensor's values, at least one, as they are; the others become 0 (SPARTA).

    A tensor is cut into as many runs as values are sent, and one place is drawn in each, so that all places have their
    turn alike. The draw follows from the round alone: replicas send the same places, which need no bytes.

    Args:
        share: of the values, more than 0 and at most 1.
    """

    share: float = 0.005

    traits = Traits(sparse=True)

    _round: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"Sampled has share={self.share}; choose more than 0 and at most 1")

    def set_round(self, round: int) -> None:
        """See Codec."""
        self._round = round

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See Transform: the values sent, and the round."""
        floating, finished = by_kind(tensors)
        flat = [tensor.reshape(-1) for tensor in floating]
        device = flat[0].device if flat else None
        places = self._places([one.numel() for one in flat], self._round)
        values = [one[place.to(one.device)].float() for one, place in zip(flat, places, strict=True)]
        number = torch.tensor([self._round], dtype=torch.int64).view(torch.uint8).to(device)
        return [joined(values) if values else torch.empty(0, device=device), number, *finished]

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        sizes = [tensor.numel() for tensor in floating]
        wanted = (torch.float32, sum(map(self._kept, sizes))), (torch.uint8, _ROUND_BYTES)
        values, number = expected(parts[: len(parts) - len(finished)], *wanted)
        places = self._places(sizes, int(number.clone().cpu().view(torch.int64)))
        each = zip(torch.split(values, list(map(self._kept, sizes))), places, sizes, strict=True)
        spread = [one.new_zeros(size).index_copy_(0, place.to(one.device), one) for one, place, size in each]
        return in_order(spread, parts[2:], like)

    def _kept(self, size: int) -> int:
        return min(size, max(1, round(self.share * size)))

    def _places(self, sizes: Sequence[int], round: int) -> list[Tensor]:
        """The places in tensors of these sizes, in order."""
        generator = torch.Generator().manual_seed(round & ((1 << 63) - 1))
        found = []
        for size in sizes:
            bounds = torch.arange(self._kept(size) + 1) * size // max(1, self._kept(size))
            drawn = torch.rand(len(bounds) - 1, generator=generator, dtype=torch.float64)
            found.append(bounds[:-1] + (drawn * bounds.diff()).long())
        return found


NAME = Name(
    pattern=r"random(\d+(?:\.\d+)?)",
    make=lambda percent: Sampled(share=share_of(percent)),
    examples=("random0.5",),
    travels="a random share of each tensor's values, here 0.5%, the same places on all replicas; for merge `sent`",
)
