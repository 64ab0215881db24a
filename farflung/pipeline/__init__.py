"""Floor 3: one replica on several machines. Read `divided.py` first."""

from farflung.pipeline.assemble import assemble
from farflung.pipeline.check import check
from farflung.pipeline.island import Island
from farflung.pipeline.mesh import Mesh, MeshCoordinates, whole_replicas
from farflung.pipeline.settings import IslandShape

__all__ = ["Island", "IslandShape", "Mesh", "MeshCoordinates", "assemble", "check", "whole_replicas"]
