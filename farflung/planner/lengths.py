"""How gaps to synchronous training close in longer runs: of rows measured at several lengths, and of all others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

Gaps = Mapping[str, Sequence[float]]
"""A measured row's gaps in per cent, seed by seed, by the inner steps of the runs."""


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


class Lengths:
    """Gaps in runs of any length, from rows that were measured, and tuned, at several.

    Between two lengths gaps lie on a line over the logarithm of steps. Below the shortest of all they are as in the
    shortest. Beyond a row's longest they close as those rows have closed that were measured in longer runs, too; beyond
    the longest of all they stay, and are at least what the power law through the last two lengths would make of them.
    """

    def __init__(self, rows: Sequence[Gaps]) -> None:
        self._rows = rows
        self._shortest = min(int(length) for row in rows for length in row)

    def known(self, row: Gaps, steps: int) -> bool:
        """Whether a run is as long as the shortest of a row; below that nothing is known of it."""
        return max(steps, self._shortest) >= _by_length(row)[0][0]

    def gap(self, row: Gaps, steps: int) -> Gap:
        """A row's gap in a run of so many inner steps."""
        measured = _by_length(row)
        lengths, gaps = [length for length, _ in measured], [gap for _, gap in measured]
        middle, least, most = (
            float(np.interp(math.log(steps), np.log(lengths), [getattr(gap, name) for gap in gaps]))
            for name in ("middle", "least", "most")
        )
        if steps <= lengths[-1]:
            return Gap(middle, least, most)
        if closing := self._closing(lengths[-1], steps):
            return gaps[-1].times(closing)
        if min(gap.middle for gap in gaps[-2:]) > 0 and least > 0:
            slope = math.log(gaps[-1].middle / gaps[-2].middle) / math.log(lengths[-1] / lengths[-2])
            least *= (steps / lengths[-1]) ** min(slope, 0.0)
        return Gap(middle, least, most)

    def _closing(self, begun: int, steps: int) -> list[float]:
        """What part of it is left of the gap at one length, of each row that was measured there and in longer runs."""
        longer = [row for row in self._rows if min(map(int, row)) <= begun < max(map(int, row))]
        found = [(self.gap(row, begun).middle, self.gap(row, steps).middle) for row in longer]
        return [after / before for before, after in found if before > 0]


def _by_length(row: Gaps) -> list[tuple[int, Gap]]:
    """Means, and two deviations to both sides; those of one seed are as large as those of the length before."""
    found, spread = list[tuple[int, Gap]](), 0.0
    for length, gaps in sorted(row.items(), key=lambda one: int(one[0])):
        middle = mean(gaps) / 100
        spread = 2 * stdev(gaps) / 100 if len(gaps) > 1 else spread
        found.append((int(length), Gap(middle, middle - spread, middle + spread)))
    return found
