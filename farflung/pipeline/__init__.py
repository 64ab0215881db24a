"""Floor 3: one replica on several machines. Read `spread.py` first."""

from farflung.pipeline.assemble import assemble
from farflung.pipeline.check import check
from farflung.pipeline.island import Island
from farflung.pipeline.layout import Layout, Place, replicas_of

__all__ = ["Island", "Layout", "Place", "assemble", "check", "replicas_of"]
