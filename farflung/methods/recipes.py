"""The methods by name, and their settings' defaults; packages add theirs by entry points."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farflung import outer
from farflung.methods.averaged import (
    decoupled_diloco,
    des_loc,
    diloco,
    dilocox,
    eager_diloco,
    gpa,
    sparseloco,
    sparta,
    streaming_diloco,
)
from farflung.methods.gossip import factored_gossip, gasloc, noloco, nolocox
from farflung.methods.gradients import ddp, demo, dynamic_threshold
from farflung.methods.weights import ist, local, random_tma, resist, super_tma
from farflung.registry import Registry

if TYPE_CHECKING:
    from farflung.outer import Method

_ALL = (
    *(noloco, nolocox, gasloc, factored_gossip, diloco, dilocox, streaming_diloco, eager_diloco, sparseloco),
    *(decoupled_diloco, sparta, des_loc, gpa, demo, dynamic_threshold, random_tma, super_tma, ist, resist, ddp, local),
)


def _check_recipe(recipe: Callable[..., Method]) -> None:
    if not isinstance(made := recipe(), outer.Method):
        raise TypeError(f"it makes {made!r}, which is no farflung.Method")
    inspect.signature(recipe, eval_str=True)


RECIPES: Registry[Callable[..., Method]] = Registry(
    "method",
    {recipe.__name__.replace("_", "-"): recipe for recipe in _ALL},
    _check_recipe,
    renamed={"dct": "dynamic-threshold"},
)
"""The methods that the command line offers, by name."""

OWNED = {name for recipe in _ALL for name in inspect.signature(recipe).parameters}
"""All settings that some method of farflung's own has."""


def defaults_of(name: str) -> dict[str, Any]:
    """A method's settings and their defaults. Raises UserError for a name that is none."""
    parameters = inspect.signature(RECIPES[name]).parameters
    return {key: one.default for key, one in parameters.items() if one.default is not one.empty}
