"""Values above a threshold that is set anew only now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.base import PacketError
from farflung.codecs.flat import FlatStage, count_of, expected
from farflung.codecs.topk import pack_places, packed_size, unpack_places
from farflung.config import UserError

_CHUNK = 4096
_COUNT_BYTES = 2


@dataclass
class Threshold(FlatStage):
    """Keeps the values of at least a threshold in magnitude; the others become 0 (DCT, arXiv 2010.08899).

    The threshold is the one that keeps `share` of the values of the message it was computed from; it serves for
    `refresh` messages. A kept value costs itself and 12 bits for its place, each 4096 values two bytes for a count.

    Args:
        share: of the values, more than 0 and at most 1.
        refresh: messages between two computations of the threshold.
    """

    share: float = 0.01
    refresh: int = 1000
    _threshold: float = field(default=0.0, init=False, repr=False, compare=False)
    _age: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"Threshold has share={self.share}; choose more than 0 and at most 1")
        if self.refresh < 1:
            raise UserError(f"Threshold has refresh={self.refresh}; choose at least 1")

    def compress(self, flat: Tensor) -> list[Tensor]:
        """The kept values, their packed places in chunks, and how many each chunk has."""
        magnitudes = flat.abs()
        if self._age % self.refresh == 0 and flat.numel():
            rank = max(flat.numel() - round(self.share * flat.numel()), 0) + 1
            self._threshold = float(magnitudes.kthvalue(min(rank, flat.numel())).values)
        self._age += 1
        # A message of zeros has the threshold 0, which nothing need be sent for.
        kept = ((magnitudes >= self._threshold) & (magnitudes > 0)).nonzero().view(-1)
        counts = torch.bincount(kept // _CHUNK, minlength=-(-flat.numel() // _CHUNK))
        return [flat[kept], pack_places(kept % _CHUNK, _CHUNK), counts.to(torch.int16).view(torch.uint8)]

    def expand(self, parts: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
        """See FlatStage."""
        numel = count_of(like)
        chunks = -(-numel // _CHUNK)
        if len(parts) != 3:
            raise PacketError("packet does not hold values, places and a count for each chunk")
        kept = parts[0].numel()
        values, packed, counts = expected(
            parts,
            (torch.float32, kept),
            (torch.uint8, packed_size(kept, _CHUNK)),
            (torch.uint8, _COUNT_BYTES * chunks),
        )
        per_chunk = counts.view(torch.int16).long()
        if int(per_chunk.sum()) != values.numel() or bool((per_chunk < 0).any()):
            raise PacketError("packet holds another number of values than its chunks count")
        begins = torch.arange(chunks, device=values.device).repeat_interleave(per_chunk) * _CHUNK
        places = begins + unpack_places(packed, values.numel(), _CHUNK)
        return torch.zeros(chunks * _CHUNK, device=values.device).index_copy_(0, places, values)[:numel]

    def state_dict(self) -> dict[str, Any]:
        """The threshold and its age in messages."""
        return {"threshold": self._threshold, "age": self._age}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Codec."""
        self._threshold, self._age = state["threshold"], state["age"]
