"""Random numbers as pure functions of their purpose: the order of calls and threads does not matter."""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

_NORMAL = NormalDist()


def uniform(*key: object) -> float:
    """A number more than 0 and less than 1 that follows from the key alone."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 12) / 2**52 + 2**-54


def largest_factor(chance: float, count: int, sigma: float) -> float:
    """The largest of `count` log-normal factors of median 1, at this quantile of its distribution."""
    # The largest of n is below x with probability F(x)^n. Near 1, its complement keeps the digits.
    tail = -math.expm1(math.log(chance) / count)
    return math.exp(-sigma * _NORMAL.inv_cdf(max(tail, 1e-300)))
