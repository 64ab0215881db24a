"""Values above a threshold that is computed again only now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import Name, Traits, share_of
from farflung.codecs.chain import Transform
from farflung.codecs.flat import by_kind, count_of, expected, flatten, in_order
from farflung.codecs.packets import PacketError
from farflung.codecs.topk import pack_places, packed_size, unpack_places
from farflung.errors import UserError

_CHUNK = 4096
_COUNT_BYTES = 2
_OFF = 2.0
"""A threshold is computed again when it keeps so many times more or fewer values than it should."""


@dataclass
class Threshold(Transform):
    """Keeps the values of at least a threshold in magnitude; the others become 0 (DCT, arXiv 2010.08899).

    Each tensor has a threshold of its own: the one that keeps `share` of the values, at least one, of the message it
    was computed from; of equal values the first ones. It is computed for messages 0, 1, 2, 4, 8 … and then for each
    `refresh`-th, since what error feedback adds grows at first. Where the last one would let through more than twice
    the share of a message, or less than half of it, it is computed for that message, too: every message keeps about
    its share, whatever came before. All of this depends on the sender's messages alone.

    A kept value costs itself and 12 bits for its place, each 4096 values two bytes for a count.

    Args:
        share: of the values, more than 0 and at most 1.
        refresh: messages between two computations of the threshold.
    """

    share: float = 0.01
    refresh: int = 1000
    traits = Traits(fixed_length=False, remembers=True, omits_zeros=True, sparse=True)
    _thresholds: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    _age: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"Threshold has share={self.share}; choose more than 0 and at most 1")
        if self.refresh < 1:
            raise UserError(f"Threshold has refresh={self.refresh}; choose at least 1")

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The kept values, their packed places in chunks, and how many each chunk has."""
        floating, finished = by_kind(tensors)
        flat = flatten(floating)
        kept = self._kept(torch.split(flat, [tensor.numel() for tensor in floating]))
        counts = kept.new_zeros(-(-flat.numel() // _CHUNK)).index_add_(0, kept // _CHUNK, torch.ones_like(kept))
        counts_bytes = counts.to(torch.int16).view(torch.uint8)
        return [flat[kept], pack_places(kept % _CHUNK, _CHUNK), counts_bytes, *finished]

    def outline(self, like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform: of a message that thresholds were set for."""
        floating, finished = by_kind(like)
        kept = sum(self._wanted(tensor.numel()) for tensor in floating)
        counts = _COUNT_BYTES * -(-count_of(floating) // _CHUNK)
        sizes = packed_size(kept, _CHUNK), counts
        packed = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
        return [torch.empty(kept, dtype=torch.float32, device="meta"), *packed, *finished]

    def _wanted(self, numel: int) -> int:
        """How many values of a tensor its threshold is set for."""
        return min(max(round(self.share * numel), 1), numel)

    def _kept(self, rows: Sequence[Tensor]) -> Tensor:
        """The places of the values that travel, in the row of all tensors; renews thresholds where they are due."""
        if len(self._thresholds) != len(rows):
            self._thresholds, self._age = [0.0] * len(rows), 0
        due = self._age % self.refresh == 0 or (self._age < self.refresh and self._age & (self._age - 1) == 0)
        self._age += 1
        kept, begin = [torch.empty(0, dtype=torch.int64, device=rows[0].device if rows else None)], 0
        for number, row in enumerate(rows):
            places = None if due else self._above(row.abs(), self._thresholds[number])
            if places is None:
                self._thresholds[number], places = self._largest(row.abs())
            kept.append(places + begin)
            begin += row.numel()
        return torch.cat(kept)

    def _above(self, magnitudes: Tensor, threshold: float) -> Tensor | None:
        """The places of the values above a threshold; None if they are too many or too few."""
        # A threshold of 0 lets through all that there is, and need not be set lower.
        places = ((magnitudes >= threshold) & (magnitudes > 0)).nonzero().view(-1)
        asked = self.share * magnitudes.numel()
        too_few = threshold > 0 and places.numel() < asked / _OFF
        too_many = places.numel() > max(asked * _OFF, 1)
        return None if too_few or too_many else places

    def _largest(self, magnitudes: Tensor) -> tuple[float, Tensor]:
        """The threshold that fits a tensor, and the places of what it lets through."""
        wanted = self._wanted(magnitudes.numel())
        if not wanted:
            return 0.0, magnitudes.nonzero().view(-1)
        threshold = magnitudes.kthvalue(magnitudes.numel() - wanted + 1).values
        above = (magnitudes > threshold).nonzero().view(-1)
        equal = ((magnitudes == threshold) & (magnitudes > 0)).nonzero().view(-1)[: wanted - above.numel()]
        return float(threshold), torch.cat([above, equal]).sort().values

    def inverse(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """See Transform."""
        floating, finished = by_kind(like)
        numel = count_of(floating)
        chunks = -(-numel // _CHUNK)
        if len(parts) != 3 + len(finished):
            raise PacketError("packet does not hold values, places and a count for each chunk")
        kept = parts[0].numel()
        values, packed, counts = expected(
            parts[:3],
            (torch.float32, kept),
            (torch.uint8, packed_size(kept, _CHUNK)),
            (torch.uint8, _COUNT_BYTES * chunks),
        )
        per_chunk = counts.view(torch.int16).long()
        if int(per_chunk.sum()) != values.numel() or bool((per_chunk < 0).any()):
            raise PacketError("packet holds another number of values than its chunks count")
        numbers = torch.arange(chunks, device=values.device)
        begins = numbers.repeat_interleave(per_chunk, output_size=values.numel()) * _CHUNK
        places = begins + unpack_places(packed, values.numel(), _CHUNK)
        flat = torch.zeros(chunks * _CHUNK, dtype=torch.float32, device=values.device).index_copy_(0, places, values)
        return in_order(torch.split(flat[:numel], [tensor.numel() for tensor in floating]), parts[3:], like)

    def state_dict(self) -> dict[str, Any]:
        """The thresholds, and how many messages there have been."""
        return {"thresholds": list(self._thresholds), "age": self._age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._thresholds, self._age = list(state["thresholds"]), state["age"]


NAME = Name(
    pattern=r"threshold(\d+(?:\.\d+)?)",
    make=lambda percent: Threshold(share=share_of(percent)),
    examples=("threshold1",),
    travels="the values above each tensor's threshold, here about 1%, and their places",
)
