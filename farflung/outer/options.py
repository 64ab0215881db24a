"""What a user may choose when attaching, besides the method."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch

from farflung.errors import UserError, suggestion
from farflung.outer.holders import Holders
from farflung.outer.outcomes import Round


class Options(TypedDict, total=False):
    """How a method is attached. Durations are in seconds."""

    outer_device: torch.device | str | None
    """Where the outer state lives; by default, with the model."""
    deadline_s: float
    """The longest that a round is waited for: 120."""
    starting_s: float
    """The longest that the others are waited for before the first step: 600."""
    robust: str
    """How messages become one on an elastic network: mean, median or clipped; see Aggregation."""
    step_weight: float
    """What an inner step weighs in the mean on an elastic network, such as its tokens: 1."""
    buffers: Literal["end", "round"]
    """Whether buffers are averaged in every "round", or only at the "end" and by `average_buffers`."""
    clock: Callable[[], float] | None
    """Seconds, by which rounds by the clock go: by default, the network's clock."""
    weighting: Literal["even", "steps"] | None
    """What a message weighs in the mean: the same, or the steps behind it; by default even, on the internet steps."""
    holders: Holders
    """Which replicas hold what of a model that has a core: by default, all of them all of it."""
    on_round: Callable[[Round], None] | None
    """Told of every round when it was applied; without it, the logger `farflung` hears of lost ones, once a partner."""


USUAL = Options(
    outer_device=None,
    deadline_s=120.0,
    starting_s=600.0,
    robust="mean",
    step_weight=1.0,
    buffers="end",
    clock=None,
    weighting=None,
    holders=Holders(),
    on_round=None,
)
_FORMERLY = {"deadline": "deadline_s", "starting": "starting_s"}


def completed(given: Mapping[str, Any]) -> Options:
    """All options, the usual ones where none were given. Raises UserError for one that there is not, or cannot be."""
    options: dict[str, Any] = {**USUAL}
    for name, value in given.items():
        if name in _FORMERLY:
            told = f"attach's {name} is called {_FORMERLY[name]} now; the old name goes with the next version"
            warnings.warn(told, DeprecationWarning, stacklevel=3)
            name = _FORMERLY[name]
            if name in given:
                raise UserError(f"{name} is given twice, once by its old name; remove one of them")
        if name not in USUAL:
            raise UserError(f"attach has no option {name!r}{suggestion(name, list(USUAL))}")
        options[name] = value
    if options["buffers"] not in ("end", "round"):
        raise UserError(f"buffers is {options['buffers']!r}; choose 'end' or 'round'")
    if options["weighting"] not in (None, "even", "steps"):
        raise UserError(f"weighting is {options['weighting']!r}; choose 'even' or 'steps'")
    for name, unit in (("deadline_s", "seconds"), ("starting_s", "seconds"), ("step_weight", "a number")):
        if not (isinstance(options[name], int | float) and options[name] > 0):
            raise UserError(f"{name} is {options[name]!r}; give {unit}, more than 0")
    for name, what in (("on_round", "is told of every round"), ("clock", "tells the time in seconds")):
        if not (options[name] is None or callable(options[name])):
            raise UserError(f"{name} is {options[name]!r}; give a function, which {what}")
    _check_device(options["outer_device"])
    return options  # type: ignore[return-value]


def _check_device(given: Any) -> None:
    try:
        torch.empty(0, device=torch.device(given or "cpu"))
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        told = f"outer_device is {given!r}, which this machine does not have; give another, such as 'cpu'"
        raise UserError(told) from error


def check_elastic(number: int, floating: Sequence[str], buffers: str) -> None:
    """Refuses what peers on the internet cannot do: buffers, and a second session. Raises UserError."""
    if number:
        raise UserError(
            "a network on the internet serves one session, and this one has had one; give attach all "
            "optimizers in a list, or open another network with a ticket of its own"
        )
    if buffers != "end":
        raise UserError(f"buffers is {buffers!r}, but peers on the internet average none; leave it out")
    if floating:
        raise UserError(
            f"the model keeps {floating[0]} besides its weights, which peers on the internet cannot average; "
            "replace BatchNorm by LayerNorm or GroupNorm, or register such buffers with persistent=False"
        )
