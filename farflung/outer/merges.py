"""What becomes of the steps that a replica trains during a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farflung.errors import UserError


class Merge(Protocol):
    """Merges a round's new anchor with the weights that the replica has trained meanwhile."""

    needs_start: bool
    """Whether the weights at the round's start must be kept."""
    eager: bool
    """Whether a replica's fresh message replaces its old one when a round is applied."""

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """The new weights θ', all flat; may overwrite `now`."""


@dataclass(frozen=True)
class Keep:
    """θ' = φ' + (θ - θ at the start): what was trained meanwhile comes on top of the new anchor."""

    needs_start = True
    eager = False

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge."""
        assert at_start is not None
        return now.sub_(at_start).add_(anchor)


@dataclass(frozen=True)
class Drop:
    """θ' = φ': what was trained meanwhile is lost."""

    needs_start = False
    eager = False

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge."""
        return anchor


@dataclass(frozen=True)
class Mix:
    """θ' = a·θ + (1 - a)·φ' (Streaming DiLoCo, arXiv 2501.18512)."""

    own: float = 0.5
    """a, from 0 (Drop) to 1 (the round has no effect on the weights)."""
    needs_start = False
    eager = False

    def __post_init__(self) -> None:
        if not 0 <= self.own <= 1:
            raise UserError(f"Mix has own={self.own}; choose from 0 to 1")

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge."""
        return now.lerp_(anchor, 1 - self.own)


@dataclass(frozen=True)
class Eager:
    """θ' = φ', where the outer step was given the group's last messages but this replica's own fresh one.

        Δ used = Δ own (now) / M + mean over the M of Δ (last round) - Δ own (last round) / M

    (arXiv 2502.12996.) For a delay of a whole round: a round is applied when the next one starts. Where none starts,
    the fresh message is left out, and the trained steps stay in the weights.
    """

    needs_start = False
    eager = True

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge; with the weights at the round's start, as Keep."""
        return anchor if at_start is None else now.sub_(at_start).add_(anchor)


_MERGES: dict[str, Merge] = {"kept": Keep(), "dropped": Drop(), "mixed": Mix(), "eager": Eager()}
"""By the names that settings use for what was trained meanwhile."""


def as_merge(given: Merge | str) -> Merge:
    """A merge, or the one of a name. Raises UserError."""
    return merge_named(given) if isinstance(given, str) else given


def merge_named(name: str) -> Merge:
    """The merge of a name. Raises UserError."""
    if not isinstance(name, str) or name not in _MERGES:
        raise UserError(f"there is no merge {name!r}; there are: {', '.join(_MERGES)}")
    return _MERGES[name]
