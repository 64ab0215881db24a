"""Floor 3: one replica on several machines. Read `divided.py` first."""

from typing import TYPE_CHECKING

from farflung.lazy import homes_of
from farflung.renamed import renamed

if TYPE_CHECKING:
    from farflung.pipeline.island import Island
    from farflung.pipeline.mesh import Mesh, MeshCoordinates, whole_replicas
    from farflung.pipeline.settings import IslandShape

__all__ = ["Island", "IslandShape", "Mesh", "MeshCoordinates", "whole_replicas"]

__getattr__ = renamed(__name__, {}, homes_of(__file__))
