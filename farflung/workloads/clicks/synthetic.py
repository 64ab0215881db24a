"""Clicks made by a rule that the seed of the data fixes: what pairs of categories have in common decides."""

from __future__ import annotations

import numpy as np

from farflung.workloads.clicks.log import Categories, ClickLog

CLICKS = 200_000
SIZES = (12, 40, 150, 500, 1500, 4000, 8000, 20_000)
"""Categories in each column."""
NUMBERS = 4
PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7), (4, 6))
"""Columns whose categories have something in common, or not."""
LATENT = 4
"""Dimensions of what a category is like."""


def read(most: int | None) -> ClickLog:
    """So many clicks; the first ones are the same ones however many there are."""
    count = CLICKS if most is None else most
    generator = np.random.default_rng(0)
    latent = [generator.standard_normal((size, LATENT)) for size in SIZES]
    own = [0.5 * generator.standard_normal(size) for size in SIZES]
    slopes = 0.4 * generator.standard_normal(NUMBERS)
    codes = [_popular(np.random.default_rng((1, n)), size, count) for n, size in enumerate(SIZES)]
    numbers = np.stack([np.random.default_rng((2, n)).standard_normal(count) for n in range(NUMBERS)])
    chance = -2.0 + slopes @ numbers + sum(weight[code] for weight, code in zip(own, codes, strict=True))
    for one, other in PAIRS:
        chance += (latent[one][codes[one]] * latent[other][codes[other]]).sum(axis=1) / np.sqrt(LATENT)
    came = np.random.default_rng(3).random(count) < 1 / (1 + np.exp(-chance))
    categories = [Categories(code, [str(n) for n in range(size)]) for code, size in zip(codes, SIZES, strict=True)]
    return ClickLog(
        "synthetic",
        came.astype(np.float32),
        {f"I{n + 1}": row.astype(np.float32) for n, row in enumerate(numbers)},
        {f"C{n + 1}": column for n, column in enumerate(categories)},
    )


def _popular(generator: np.random.Generator, size: int, count: int) -> np.ndarray:
    """Categories of which the n-th comes about as often as 1 / n."""
    return np.floor(size ** generator.random(count)).astype(np.int64) - 1
