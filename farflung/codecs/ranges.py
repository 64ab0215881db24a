"""How far a block's values may be from the receiver's, as the sender of modulo codecs tracks it."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass
class RangeTracker:
    """Chooses R for each block of a message, from the distances to others' values; `bits` and so on are Modulo's.

    R is `margin` times twice the largest distance that was seen lately, times what news have grown by since as in a
    warm-up, or twice the largest change that was told, if that is more.
    """

    bits: int
    block: int
    margin: float
    ranges: Tensor | None = None
    """R of each block in the last message."""
    news_grow: bool = True
    """Whether each message so far differed more from its reference than the last; true before the second."""
    farthest: Tensor | None = None
    lately: Tensor | None = None
    news: Tensor | None = None
    reference: Tensor | None = None
    change: Tensor | None = None

    def set_change(self, flat: Tensor) -> None:
        """See Codec."""
        self.change = self._largest(flat)

    def next(self, flat: Tensor) -> Tensor:
        """R of each block of the next message: from the distances seen since the last one, else as it was."""
        largest = self._largest(flat)
        news = None if self.reference is None else self._largest(flat - self.reference)
        growth = self._growth(news)

        def grown(ranges: Tensor) -> Tensor:
            """Ranges for distances that grow as news do, but by no more than the news of two."""
            return ranges if news is None else torch.minimum(ranges * growth, ranges + 4 * self.margin * news)

        if self.ranges is None or len(self.ranges) != len(largest):
            # Before any exchange, assume that others are as far from the reference as this replica.
            ranges = (largest if news is None else news) * (4 * self.margin)
        elif self.farthest is None:
            ranges = grown(self.ranges)
        else:
            assert self.lately is not None
            distances = self.farthest.maximum(self.lately)
            heard = self.farthest >= 0
            ranges = grown(torch.where(heard, 2 * self.margin * distances, self.ranges))
            self.lately = torch.where(heard, _KEPT * self.lately, self.lately)
        if self.change is not None and len(self.change) == len(ranges):
            ranges = ranges.maximum(2 * self.margin * self.change)
        ranges = ranges.maximum(largest * (_PRECISION * 2.0**self.bits))
        self.ranges = ranges.clamp(max=torch.finfo(torch.bfloat16).max)
        self.change = self.farthest = None
        return self.ranges

    def _growth(self, news: Tensor | None) -> float:
        """By how much news have grown since the last message, as norms over all blocks; 1 where that is not known."""
        before, self.news, self.reference = self.news, news, None
        if before is None or news is None or len(before) != len(news) or not before.any():
            return 1.0
        growth = float(news.norm() / before.norm())
        self.news_grow = growth > _GROWS
        return max(growth, 1.0)

    def saw(self, chosen: slice, distances: Tensor, surely: Tensor, count: int) -> None:
        """Keeps the largest distance of each chosen block of `count` for the next message.

        `surely` is what is also kept for later ones.
        """
        if self.farthest is None or len(self.farthest) != count:  # below 0 for what has not been heard
            self.farthest = torch.full((count,), -1.0, dtype=torch.float32, device=distances.device)
        if self.lately is None or len(self.lately) != count:
            self.lately = torch.zeros(count, dtype=torch.float32, device=distances.device)
        self.farthest[chosen] = self.farthest[chosen].maximum(distances)
        self.lately[chosen] = self.lately[chosen].maximum(surely)

    def _largest(self, flat: Tensor) -> Tensor:
        """The largest magnitude of each block."""
        return torch.cat([piece.abs().amax(1) for piece in rows(flat, self.block)])

    def state_nbytes(self, blocks: int) -> int:
        """The bytes that it keeps of so many blocks: ranges, two distances and the news."""
        return 4 * torch.float32.itemsize * blocks

    def state_dict(self) -> dict[str, Any]:
        """Ranges, distances and news of the blocks."""
        names = "ranges", "farthest", "lately", "reference", "news", "news_grow"
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        vars(self).update({name: state[name] for name in self.state_dict()})
