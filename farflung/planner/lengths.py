"""How gaps to synchronous training close in longer runs: of rows measured at several lengths, and of all others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Gap:
    """By which share of it a validation loss is above ddp's: what is to be expected, and from where to where."""

    middle: float
    least: float
    most: float

    def times(self, factors: Sequence[float]) -> Gap:
        """With any of these factors: their mean in the middle, and what is farthest from it at the ends."""
        ends = [end * factor for end in (self.least, self.most) for factor in factors]
        return Gap(self.middle * mean(factors), min(ends), max(ends))


def measured_gap(gaps: Sequence[float]) -> Gap:
    """Of per cents on several seeds: their mean, and two deviations to both sides. One seed has none."""
    middle, spread = mean(gaps) / 100, 2 * stdev(gaps) / 100 if len(gaps) > 1 else 0.0
    return Gap(middle, middle - spread, middle + spread)


class Lengths:
    """Gaps in a run of so many inner steps, from rows that were measured, and tuned, at several lengths.

    Between two lengths gaps lie on a line over the logarithm of steps. Below the shortest of all they are as in the
    shortest; beyond the longest as in the longest, and at least what the power law through the last two would make of
    them.

    Args:
        rows: each with its gaps in per cent on several seeds, by lengths.
        steps: of the run to come.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        self._steps = steps
        measured = {int(length) for row in rows for length in row["gaps"]}
        self.shortest, self.longest = min(measured), max(measured)

    def known(self, row: Mapping[str, Any]) -> bool:
        """Whether the run is as long as the shortest of this row; below that nothing is known of it."""
        return max(self._steps, self.shortest) >= _by_length(row)[0][0]

    def gap(self, row: Mapping[str, Any]) -> Gap:
        """Of one of the rows."""
        lengths, gaps = zip(*_by_length(row), strict=True)
        middle, least, most = (
            float(np.interp(math.log(self._steps), np.log(lengths), [getattr(gap, name) for gap in gaps]))
            for name in ("middle", "least", "most")
        )
        if self._steps > lengths[-1] and min(gap.middle for gap in gaps[-2:]) > 0 and least > 0:
            slope = math.log(gaps[-1].middle / gaps[-2].middle) / math.log(lengths[-1] / lengths[-2])
            least *= (self._steps / lengths[-1]) ** min(slope, 0.0)
        return Gap(middle, least, most)

    def closing(self, rows: Iterable[Mapping[str, Any]]) -> list[float]:
        """Of each of some rows that was measured at the shortest length: its gap as a part of that there."""
        found = [(row, *_by_length(row)[0]) for row in rows]
        return [self.gap(row).middle / gap.middle for row, length, gap in found if length == self.shortest]


def _by_length(row: Mapping[str, Any]) -> list[tuple[int, Gap]]:
    return sorted((int(length), measured_gap(gaps)) for length, gaps in row["gaps"].items())
