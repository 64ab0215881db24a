"""What a method may deal out among its replicas: units of one model, of which each trains some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from farflung.outer.session import Session
    from farflung.outer.setup import Setup


class Dealing(Protocol):
    """Gives replicas parts of one model to train, and makes one model of these again.

    A replica's weights, as they are saved and averaged, have noughts for what others hold.
    """

    def session(self, setup: Setup) -> Session:
        """The rounds of such replicas. Raises UserError for a model, a network or a method that they cannot be of."""

    def check(self, model: nn.Module, replicas: int) -> None:
        """Raises UserError for a model that so many replicas cannot share; it may have no memory yet."""

    def assemble(self, mean: Mapping[str, Tensor], model: nn.Module, replicas: int) -> None:
        """Makes the whole model's weights, in place, of the mean of so many replicas'."""

    def assemble_best(self, model: nn.Module, replicas: int, badness: Callable[[], float]) -> float:
        """The same in a model that has the mean, scaled so that it is least bad; returns the scale of its branches."""
