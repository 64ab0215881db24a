"""Floor 3: tables of embeddings that replicas hold together. Read `tables.py` first."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.embeddings.crossings import Bags, Crossing, DistinctRows, LargestOfSample
    from farflung.embeddings.tables import ShardedTables

__all__ = ["Bags", "Crossing", "DistinctRows", "LargestOfSample", "ShardedTables"]

__getattr__ = renamed(__name__, {}, homes_of(__file__))
