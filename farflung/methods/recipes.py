"""The methods by name, and their settings' defaults; packages add theirs by entry points."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from farflung import outer
from farflung.methods import averaged, gossip, gradients, weights
from farflung.registry import Registry

if TYPE_CHECKING:
    from farflung.outer import Method

_ALL = (
    *(gossip.noloco, gossip.nolocox, gossip.gasloc, gossip.factored_gossip),
    *(averaged.diloco, averaged.dilocox, averaged.streaming_diloco, averaged.eager_diloco, averaged.sparseloco),
    *(averaged.decoupled_diloco, averaged.sparta, averaged.des_loc, averaged.gpa),
    *(gradients.demo, gradients.dynamic_threshold, weights.random_tma, weights.super_tma, weights.ist, weights.resist),
    *(gradients.ddp, weights.local),
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
