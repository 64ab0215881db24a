"""From the columns of a click log to what a model takes: rows of tables, and numbers of about one size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflung.errors import UserError
from farflung.workloads.base import Ids
from farflung.workloads.clicks.log import Categories, ClickLog

UNKNOWN = 0
"""The row of categories that have none of their own."""


class Clicks(NamedTuple):
    """Some clicks as a model takes them."""

    labels: Tensor
    """(clicks,) float32."""
    numbers: Tensor
    """(clicks, columns) float32, of mean 0 and deviation 1 in training."""
    rows: Tensor
    """(clicks, columns) int64, of each column's table."""


@dataclass(frozen=True)
class Encoder:
    """What the training clicks have fixed: their categories' rows, and the sizes of their numbers.

    Args:
        words: of each column, the categories that have rows, from row 1 on.
        centres: the mean of each column of numbers, on the scale of `_even`, and the deviation.
    """

    words: Mapping[str, list[str]]
    centres: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, log: ClickLog, training: Ids, max_rows: int) -> Encoder:
        """From the training clicks of a log."""
        words = {name: _most_frequent(column, training, max_rows - 1) for name, column in log.categories.items()}
        return cls(words, {name: _centre(_even(column[training])) for name, column in log.numbers.items()})

    @property
    def table_rows(self) -> list[int]:
        """The rows of each table."""
        return [len(words) + 1 for words in self.words.values()]

    @cached_property
    def _row_of(self) -> dict[str, dict[str, int]]:
        return {name: {word: n for n, word in enumerate(words, start=1)} for name, words in self.words.items()}

    def encoded(self, log: ClickLog) -> Clicks:
        """The clicks of a log. Raises UserError where it has other columns."""
        own = [*self.centres, *self.words]
        if sorted(given := [*log.numbers, *log.categories]) != sorted(own):
            raise UserError(f"{log.where} has the columns {', '.join(given)}; the model has {', '.join(own)}")
        numbers = [
            np.nan_to_num((_even(log.numbers[name]) - mean) / deviation)
            for name, (mean, deviation) in self.centres.items()
        ]
        rows = [self._rows(name, log.categories[name]) for name in self.words]
        return Clicks(
            torch.tensor(log.labels),
            torch.from_numpy(np.stack(numbers, axis=1).astype(np.float32)) if numbers else torch.empty(len(log), 0),
            torch.from_numpy(np.stack(rows, axis=1)),
        )

    def _rows(self, name: str, column: Categories) -> NDArray[np.int64]:
        row_of = self._row_of[name]
        return np.array([row_of.get(word, UNKNOWN) for word in column.words], np.int64)[column.codes]


def _most_frequent(column: Categories, clicks: Ids, most: int) -> list[str]:
    """The categories that come most often in some clicks; of equally frequent ones the first by name."""
    counts = np.bincount(column.codes[clicks], minlength=len(column.words))
    there = sorted(counts.nonzero()[0].tolist(), key=lambda code: (-counts[code], column.words[code]))
    return [column.words[code] for code in there[:most]]


def _even(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Counts of things grow by factors: their logarithm does not."""
    return np.sign(numbers) * np.log1p(np.abs(numbers))


def _centre(numbers: NDArray[np.float32]) -> tuple[float, float]:
    """Mean and deviation, of 1 where there is none."""
    there = numbers[~np.isnan(numbers)].astype(np.float64)
    if not len(there):
        return 0.0, 1.0
    return float(there.mean()), float(there.std()) or 1.0
