"""k-means in two levels: many fine clusters first, then few coarse ones of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PASSES = 50
"""Of Lloyd's algorithm, at most."""
TRIES = 8
"""Of the coarse level, of which the best counts: it is small."""
AT_ONCE = 1 << 13
"""Points whose distances are computed at once."""


@dataclass(frozen=True)
class Clusters:
    """Fine centroids (m, d) float64, and which coarse cluster each is of (m,) int64."""

    fine: Tensor
    coarse: Tensor

    def of(self, points: Tensor) -> Tensor:
        """(n,) int64: the coarse cluster of the fine centroid that each of the points (n, d) is nearest to."""
        return self.coarse[nearest(points, self.fine)[0]]


def two_levels(points: Tensor, fine: int, coarse: int, seed: int) -> Clusters:
    """The `coarse` clusters of up to `fine` centroids of points (n, d) float64, each weighing as many as are near it.

    Deterministic for a seed. There are fewer clusters where fewer points differ.
    """
    random = torch.Generator().manual_seed(seed)
    small = k_means(points, torch.ones(len(points), dtype=points.dtype), fine, random)
    weights = torch.bincount(nearest(points, small)[0], minlength=len(small)).to(points.dtype)
    found = [k_means(small, weights, coarse, random) for _ in range(TRIES)]
    best = min(found, key=lambda centroids: float(weights @ nearest(small, centroids)[1]))
    return Clusters(small, nearest(small, best)[0])


def k_means(points: Tensor, weights: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Up to `count` centroids (m, d) of weighted points: k-means++ (Arthur, Vassilvitskii 2007), then Lloyd's steps."""
    centroids = _spread(points, weights, count, random)
    own = nearest(points, centroids)[0]
    for _ in range(PASSES):
        sums = torch.zeros_like(centroids).index_add_(0, own, points * weights[:, None])
        mass = torch.zeros_like(centroids[:, 0]).index_add_(0, own, weights)[:, None]
        centroids = torch.where(mass > 0, sums / mass, centroids)  # one that nobody is near stays where it is
        before, own = own, nearest(points, centroids)[0]
        if torch.equal(before, own):
            break
    return centroids


def nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the points (n, d), the number of its nearest centroid, and the square of the distance."""
    each = [torch.cdist(some, centroids).square().min(dim=1) for some in points.split(AT_ONCE)]
    return torch.cat([one.indices for one in each]), torch.cat([one.values for one in each])


def _spread(points: Tensor, weights: Tensor, count: int, random: torch.Generator) -> Tensor:
    """Some of the points, each drawn by the square of its distance to those before it; fewer where others are equal."""
    chosen = [_drawn(weights, random)]
    away = (points - points[chosen[0]]).square().sum(dim=1)
    while len(chosen) < count and bool((away > 0).any()):
        chosen.append(_drawn(weights * away, random))
        away = torch.minimum(away, (points - points[chosen[-1]]).square().sum(dim=1))
    return points[chosen]


def _drawn(weights: Tensor, random: torch.Generator) -> int:
    """A number by its weight; torch's own draw takes no more than 2^24 of them."""
    ends = weights.cumsum(0)
    place = torch.rand((), generator=random, dtype=ends.dtype) * ends[-1]
    return int(torch.searchsorted(ends, place, right=True).clamp(max=len(ends) - 1))
