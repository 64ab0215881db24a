"""Graphs: the kind of each node, or which nodes are linked, learnt by replicas that each have a part of the graph.

Read `workload.py` first.
"""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.workloads.graph.models import load
    from farflung.workloads.graph.workload import Graph

__all__ = ["Graph", "load"]

__getattr__ = renamed(__name__, {}, homes_of(__file__))
