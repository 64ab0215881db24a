"""Data of several sources, each with a weight: `0.7*code/**/*.py + 0.3*stories.parquet`."""

from __future__ import annotations

import re
from typing import NamedTuple

from farflung.errors import UserError

BLOCK = 1000
"""So many sequences of a replica, one after the other, have each source's share of them."""
MOST = 100
"""Sources."""
SLACK = 0.0015
"""By how much weights that were rounded may miss 1."""

_WEIGHTED = re.compile(r"(\d+\.?\d*|\.\d+)\s*\*\s*(\S.*)")


class Source(NamedTuple):
    """One of them."""

    share: int
    """Sequences of each BLOCK."""
    data: str
    """As `--data` would name it alone."""


def sources(data: str) -> list[Source]:
    """The sources that `--data` names; none where it names one thing. Raises UserError for weights that cannot be."""
    terms = re.split(r"\s\+\s", data)
    matches = [_WEIGHTED.fullmatch(term.strip()) for term in terms]
    if len(terms) == 1 or not any(matches):
        return []
    weights: dict[str, float] = {}
    for term, match in zip(terms, matches, strict=True):
        if not match:
            raise UserError(f"data {data!r}: {term.strip()!r} has no weight; write each source as 0.3*PATH")
        if match[2] in weights:
            raise UserError(f"data {data!r}: {match[2]} is there twice; give it once, with both weights together")
        weights[match[2]] = float(match[1])
    if abs(sum(weights.values()) - 1) > SLACK:
        raise UserError(f"data {data!r}: the weights come to {sum(weights.values()):.6g}; make them come to 1")
    if len(weights) > MOST:
        raise UserError(f"data has {len(weights)} sources, and may have {MOST}; join some with a glob")
    found, end, dealt = [], 0.0, 0
    for source, weight in weights.items():
        end += weight / sum(weights.values())
        share, dealt = round(end * BLOCK) - dealt, round(end * BLOCK)
        if not share:
            raise UserError(
                f"data {data!r}: the weight of {source} is less than a thousandth; leave it out, or give more"
            )
        found.append(Source(share, source))
    return found
