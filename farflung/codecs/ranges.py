"""How far a block's values may be from the receiver's, as the sender of modulo codecs tracks it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farflung.codecs.flat import rows

_PRECISION = 2.0**-20
"""The finest step, relative to a block's largest value: beyond it float32 cannot count in steps."""

_GROWS = 1.05
"""News that grow by less from one message to the next are taken to grow no more."""

_KEPT = 0.9
"""How much of a distance is still expected a message later: a replica that sat out is far away."""


class RangeTracker:
    """Chooses R for each block of a message, from the distances to others' values.

    R is `margin` times twice the largest distance that was seen lately, times what news have grown by since as in a
    warm-up, or twice the largest change that was told, if that is more.

    Args:
        bits: of a value that are sent.
        block: values that share R.
        margin: room for distances to grow within a round.
    """

    def __init__(self, bits: int, block: int, margin: float) -> None:
        self._bits = bits
        self._block = block
        self._margin = margin
        self.ranges: Tensor | None = None
        """R of each block in the last message."""
        self.news_grow = True
        """Whether each message so far differed more from its reference than the last; true before the second."""
        self._farthest: Tensor | None = None
        self._lately: Tensor | None = None
        self._news: Tensor | None = None
        self._reference: Tensor | None = None
        self._change: Tensor | None = None

    def set_reference(self, flat: Tensor) -> None:
        """See Codec."""
        self._reference = flat

    def set_change(self, flat: Tensor) -> None:
        """See Codec."""
        self._change = self._largest(flat)

    def next(self, flat: Tensor) -> Tensor:
        """R of each block of the next message: from the distances seen since the last one, else as it was."""
        largest = self._largest(flat)
        news = None if self._reference is None else self._largest(flat - self._reference)
        growth = self._growth(news)

        def grown(ranges: Tensor) -> Tensor:
            """Ranges for distances that grow as news do, but by no more than the news of two."""
            return ranges if news is None else torch.minimum(ranges * growth, ranges + 4 * self._margin * news)

        if self.ranges is None or len(self.ranges) != len(largest):
            # Before any exchange, assume that others are as far from the reference as this replica.
            ranges = (largest if news is None else news) * (4 * self._margin)
        elif self._farthest is None:
            ranges = grown(self.ranges)
        else:
            assert self._lately is not None
            distances = self._farthest.maximum(self._lately)
            heard = self._farthest >= 0
            ranges = grown(torch.where(heard, 2 * self._margin * distances, self.ranges))
            self._lately = torch.where(heard, _KEPT * self._lately, self._lately)
        if self._change is not None and len(self._change) == len(ranges):
            ranges = ranges.maximum(2 * self._margin * self._change)
        ranges = ranges.maximum(largest * (_PRECISION * 2.0**self._bits))
        self.ranges = ranges.clamp(max=torch.finfo(torch.bfloat16).max)
        self._change = self._farthest = None
        return self.ranges

    def _growth(self, news: Tensor | None) -> float:
        """By how much news have grown since the last message, as norms over all blocks; 1 where that is not known."""
        before, self._news, self._reference = self._news, news, None
        if before is None or news is None or len(before) != len(news) or not before.any():
            return 1.0
        growth = float(news.norm() / before.norm())
        self.news_grow = growth > _GROWS
        return max(growth, 1.0)

    def saw(self, chosen: slice, distances: Tensor, surely: Tensor, count: int) -> None:
        """Keeps the largest distance of each chosen block of `count` for the next message.

        `surely` is what is also kept for later ones.
        """
        if self._farthest is None or len(self._farthest) != count:  # below 0 for what has not been heard
            self._farthest = torch.full((count,), -1.0, dtype=torch.float32, device=distances.device)
        if self._lately is None or len(self._lately) != count:
            self._lately = torch.zeros(count, dtype=torch.float32, device=distances.device)
        self._farthest[chosen] = self._farthest[chosen].maximum(distances)
        self._lately[chosen] = self._lately[chosen].maximum(surely)

    def _largest(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each block."""
        return torch.cat([piece.abs().amax(1) for piece in rows(flat, self._block)])

    def state_nbytes(self, blocks: int) -> int:
        """The bytes that it keeps of so many blocks: ranges, two distances and the news."""
        return 4 * torch.float32.itemsize * blocks

    def state_dict(self) -> dict[str, Any]:
        """Ranges, distances and news of the blocks."""
        return {
            "ranges": self.ranges,
            "farthest": self._farthest,
            "lately": self._lately,
            "reference": self._reference,
            "news": self._news,
            "news_grow": self.news_grow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.ranges, self._farthest, self._lately = state["ranges"], state["farthest"], state["lately"]
        self._reference, self._news, self.news_grow = state["reference"], state["news"], state["news_grow"]
