"""A click log: a label, numbers and categories for each click, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflung.errors import UserError


class Categories(NamedTuple):
    """One column of categories."""

    codes: NDArray[np.int64]
    """Of each click, the place of its category in `words`."""
    words: Sequence[str]


@dataclass(frozen=True)
class ClickLog:
    """So many clicks.

    Args:
        where: they are from, for messages.
        labels: (clicks,) float32, 1 where the click came, else 0.
        numbers: (clicks,) float32 of each column, by its name; NaN where there is none.
        categories: of each column, by its name.
    """

    where: str
    labels: NDArray[np.float32]
    numbers: dict[str, NDArray[np.float32]]
    categories: dict[str, Categories]

    def __len__(self) -> int:
        return len(self.labels)

    def shown(self, click: int) -> dict[str, str]:
        """The categories of one click, by their columns."""
        return {name: column.words[column.codes[click]] for name, column in self.categories.items()}


def refuse_one_sided(labels: NDArray[np.float32], which: str, remedy: str) -> None:
    """Raises UserError where all clicks came, or none: nothing can then be learnt or judged."""
    if not labels.any() or labels.all():
        missing = "no positive click (label 1)" if not labels.any() else "no negative click (label 0)"
        raise UserError(f"{which} hold {missing} among {len(labels)}; {remedy}")
