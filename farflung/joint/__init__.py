"""Floor 2: cores. A part of a model that computes without the rest, so that weak replicas can train it alone."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.joint.kinds import Core, core_named
    from farflung.joint.maps import core_alone, reduce_to_core

__all__ = ["Core", "core_alone", "core_named", "reduce_to_core"]

__getattr__ = renamed(__name__, {}, homes_of(__file__))
