"""What becomes of the steps that a replica trains during a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farflung.codecs.values import rescaled
from farflung.errors import UserError

Turn = Callable[[Tensor, Tensor], None]
"""Changes a gradient, given the outer momentum."""


class Merge(Protocol):
    """Merges a round's new anchor with the weights that the replica has trained meanwhile."""

    needs_start: bool
    """Whether the weights at the round's start must be kept."""
    eager: bool
    """Whether a replica's fresh message replaces its old one when a round is applied."""
    only_sent: bool
    """Whether a round only lands where somebody has sent something, and elsewhere the weights go on as they are."""

    @property
    def turn(self) -> Turn | None:
        """What is done to each tensor of a late round's gradient before the outer step."""

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """The new weights θ', all flat; may overwrite `now`."""


@dataclass(frozen=True)
class Keep:
    """θ' = φ' + (θ - θ at the start): what was trained meanwhile comes on top of the new anchor."""

    needs_start = True
    eager = False
    only_sent = False
    turn = None

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge."""
        assert at_start is not None
        return now.sub_(at_start).add_(anchor)


@dataclass(frozen=True)
class Drop:
    """θ' = φ': what was trained meanwhile is lost."""

    needs_start = False
    eager = False
    only_sent = False
    turn = None

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
    only_sent = False
    turn = None

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
    only_sent = False
    turn = None

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge; with the weights at the round's start, as Keep."""
        return anchor if at_start is None else now.sub_(at_start).add_(anchor)


@dataclass(frozen=True)
class KeepSent(Keep):
    """As Keep where something was sent; elsewhere θ' = θ (LOSCAR's landing, arXiv 2605.20866).

    For codecs that send some of the values, best the same on all replicas: what a replica has learnt elsewhere stays in
    its weights, and so in its next message, and need not be fed back. Where only others sent, it takes their mean.
    """

    only_sent = True


@dataclass(frozen=True)
class KeepTurned:
    """As Keep, of a late gradient Δ that is first turned towards the outer momentum m (HeLoCo, arXiv 2606.00271).

    For each tensor, with c the cosine of the two and s = |Δ| / (|Δ| + |m|), m as a mean of gradients:

        c ≥ aligned          Δ stays
        0 ≤ c < aligned      Δ ← |Δ|·φ((1 - λ)·φ(Δ) + λ·φ(m)),   λ = min(1, turning·(1 - c)·s),   φ(x) = x / |x|
        c < 0                Δ ← Δ - β·c·|Δ|·φ(m),               β = min(1, -shrinking·c·s)

    so that what goes against the momentum is at most taken away. The three numbers are ours.
    """

    aligned: float = 0.5
    turning: float = 0.5
    shrinking: float = 1.0
    needs_start = True
    eager = False
    only_sent = False

    def merge(self, now: Tensor, at_start: Tensor | None, anchor: Tensor) -> Tensor:
        """See Merge."""
        return Keep().merge(now, at_start, anchor)

    def turn(self, gradient: Tensor, momentum: Tensor) -> None:
        """See Merge."""
        if gradient.numel():  # as large as 1 each, since squares of large or small values would leave their range
            own, of_momentum = _power_of_two(gradient), _power_of_two(momentum)
            self._turn(gradient.div_(own), momentum / of_momentum, of_momentum / own)
            rescaled(gradient, own)

    def _turn(self, gradient: Tensor, momentum: Tensor, larger: Tensor) -> None:
        """See turn; the momentum is so many times larger than it is given."""
        length, other = torch.linalg.vector_norm(gradient), torch.linalg.vector_norm(momentum)
        if not (length > 0 and other > 0):
            return
        along = momentum / other
        cosine = torch.sum(gradient / length * along)
        share = length / (length + other * larger)
        if cosine < 0:
            most = torch.clamp(-self.shrinking * cosine * share, max=1)
            gradient.sub_(along * (most * cosine * length))
        elif cosine < self.aligned:
            turned = torch.lerp(gradient / length, along, torch.clamp(self.turning * (1 - cosine) * share, max=1))
            gradient.copy_(turned * (length / torch.linalg.vector_norm(turned)))


def _power_of_two(tensor: Tensor) -> Tensor:
    """The largest that is no more than its largest value, or 1: to divide by it rounds nothing."""
    largest = tensor.abs().amax()
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1), 1)


_MERGES: dict[str, Merge] = {
    "kept": Keep(),
    "dropped": Drop(),
    "mixed": Mix(),
    "eager": Eager(),
    "sent": KeepSent(),
    "turned": KeepTurned(),
}
"""By the names that settings use for what was trained meanwhile."""


def as_merge(given: Merge | str) -> Merge:
    """A merge, or the one of a name. Raises UserError."""
    return merge_named(given) if isinstance(given, str) else given


def merge_named(name: str) -> Merge:
    """The merge of a name. Raises UserError."""
    if not isinstance(name, str) or name not in _MERGES:
        raise UserError(f"there is no merge {name!r}; there are: {', '.join(_MERGES)}")
    return _MERGES[name]
