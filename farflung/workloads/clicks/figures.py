"""How good guesses of clicks are."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The area under the ROC curve: how often a click that came has a higher score than one that did not.

    Equal scores count half. It is the Mann-Whitney statistic over the number of pairs; NaN where there are none,
    and where a score is NaN.
    """
    came, scores = np.asarray(labels) > 0, np.asarray(scores)
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = counts.cumsum() - (counts - 1) / 2
    positive, negative = int(came.sum()), int((~came).sum())
    if not positive or not negative or np.isnan(scores).any():
        return float("nan")
    above = mean_ranks[inverse][came].sum() - positive * (positive + 1) / 2
    return float(above / (positive * negative))
