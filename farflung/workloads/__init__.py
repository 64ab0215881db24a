"""Floor 2: what is trained, and on what data. Read `base.py` first."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.workloads.base import Divisible, Workload
    from farflung.workloads.language import Language
    from farflung.workloads.registry import WORKLOADS

__all__ = ["WORKLOADS", "Divisible", "Language", "Workload"]

__getattr__ = renamed(__name__, {}, homes_of(__file__))
