"""Floor 4: every published method, as a recipe of choices on shared parts.

Defaults are the papers', but for outer momenta: 0.5 in all of the DiLoCo family, whose 0.9 is for runs of hundreds of
rounds and did worse than no exchange at all in shorter ones (docs/evidence.md, "The gap", and docs/measured.md).
"""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
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
from farflung.methods.recipes import RECIPES, defaults_of
from farflung.methods.settings import RoundSettings, chosen
from farflung.methods.weights import ist, local, random_tma, resist, super_tma
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.outer import Method

__all__ = [
    "RECIPES",
    "Method",
    "RoundSettings",
    "chosen",
    "ddp",
    "decoupled_diloco",
    "defaults_of",
    "demo",
    "des_loc",
    "diloco",
    "dilocox",
    "dynamic_threshold",
    "eager_diloco",
    "factored_gossip",
    "gasloc",
    "gpa",
    "ist",
    "local",
    "noloco",
    "nolocox",
    "random_tma",
    "resist",
    "sparseloco",
    "sparta",
    "streaming_diloco",
    "super_tma",
]

__getattr__ = renamed(__name__, {"dct": "dynamic_threshold", "settings_of": "defaults_of"}, homes_of(__file__))
