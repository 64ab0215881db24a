"""Floor 4: independent subnetworks. Each replica trains some units of a model, which are dealt anew each round."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.subnets.dealing import DealtUnits

__all__ = ["DealtUnits"]

__getattr__ = renamed(__name__, {}, homes_of(__file__))
