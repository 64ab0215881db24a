"""What the package has of each kind, from its own lists: a new one is tested by being there."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from farflung import methods
from farflung.methods import RECIPES, Method
from farflung.outer import topologies
from farflung.outer.merges import _MERGES

METHODS = tuple(sorted(name for name in RECIPES if RECIPES[name]().dealing is None))
"""Those that train any model; what deals out units of a decoder is in test_subnets.py."""
MERGES = _MERGES
TOPOLOGIES = {name: kind for name, kind in vars(topologies).items() if is_dataclass(kind)}


def made(name: str, **settings: Any) -> Method:
    """A method with those of the settings that it has."""
    known = methods.defaults_of(name)
    return RECIPES[name](**{key: value for key, value in settings.items() if key in known})
