"""Sending less, and more often, as the effective rank falls."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.errors import UserError


@dataclass(frozen=True)
class Adapt:
    """How the codec's rank and the steps between rounds follow the effective rank (DiLoCoX, arXiv 2506.21263).

    A codec of low rank limits the effective rank of the mean message, so that is divided by the share of the rank that
    the codec has now. The quotient is averaged over `window` rounds. Where it falls below its maximum, the share
    shrinks by the same factor. `every` shrinks with the share, since a shorter exchange needs fewer steps to hide
    behind.
    """

    window: int = 5
    least: float = 0.25
    """The smallest share."""
    steps: bool = True
    """Whether `every` shrinks, too. All replicas must agree on it, so it is only for methods that average among all."""

    def __post_init__(self) -> None:
        if self.window < 1 or not 0 < self.least <= 1:
            raise UserError(f"{self} is not possible: window must be at least 1, least more than 0 and at most 1")


class Adaptation:
    """The effective ranks seen so far, and the share that follows from them."""

    def __init__(self, settings: Adapt) -> None:
        self.settings = settings
        self._share = 1.0
        self._most = 0.0
        self._last: list[float] = []

    def observe(self, rank: float) -> float:
        """Records the effective rank of a round's mean message; returns the new share."""
        self._last = [*self._last, rank / self._share][-self.settings.window :]
        use = sum(self._last) / len(self._last)
        self._most = max(self._most, use)
        if self._most:
            self._share = max(self.settings.least, self._share * use / self._most)
        return self._share

    def state_dict(self) -> dict[str, Any]:
        """The effective ranks that are still needed."""
        return {"share": self._share, "most": self._most, "last": self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self._share, self._most, self._last = state["share"], state["most"], list(state["last"])


def effective_ranks(tensors: Iterable[Tensor]) -> tuple[float, int]:
    """exp(entropy of σ / sum σ) of the singular values σ (Roy and Vetterli 2007); over matrices, the sum by size.

    Returns the sum and the sizes', of which the quotient is the mean. Tensors of more than two dimensions count as
    matrices of their first one; others do not count.
    """
    total, weight = 0.0, 0
    for tensor in tensors:
        if tensor.dim() > 1 and tensor.numel():
            singular = torch.linalg.svdvals(tensor.reshape(len(tensor), -1).float()).double()
            shares = singular / singular.sum().clamp(min=1e-300)
            entropy = -float(torch.special.xlogy(shares, shares).sum())
            total += tensor.numel() * math.exp(entropy)
            weight += tensor.numel()
    return total, weight
