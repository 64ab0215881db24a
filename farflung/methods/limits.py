"""What recipes share: codecs by name, the outer step of the DiLoCo family, and the limits of outer optimizers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from farflung import codecs
from farflung.lazy import Later
from farflung.tables import Rule

if TYPE_CHECKING:
    import torch

    from farflung.codecs import Codec
    from farflung.outer import OuterFactory
else:
    torch = Later("torch")

LIMITS = {
    "outer_lr": Rule(above=0),
    "outer_momentum": Rule(least=0, below=1),
    "gamma": Rule(least=0),
    "group_size": Rule(least=2),
    "quorum": Rule(least=1),
}
"""Of settings that a recipe checks before anything is made of them, by name."""


def codec_of(given: Codec | str | None, usual: Codec) -> Codec:
    """A codec, or the one of a name; the usual one where none is given. Raises UserError."""
    return usual if given is None else codecs.as_codec(given)


def check_limits(**chosen: float) -> None:
    """Refuses settings that are out of their limits. Raises UserError."""
    for name, value in chosen.items():
        LIMITS[name].check(name, value)


def nesterov(lr: float, momentum: float) -> OuterFactory:
    """Makes SGD with Nesterov's momentum. Raises UserError."""
    check_limits(outer_lr=lr, outer_momentum=momentum)
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)
