"""Floor 2: what is trained, and on what data. Read `base.py` first."""

from farflung.registry import Registry
from farflung.workloads.base import Divisible, Workload
from farflung.workloads.language import Language

__all__ = ["WORKLOADS", "Divisible", "Language", "Workload"]

WORKLOADS: Registry[type[Workload]] = Registry("workload", {"language": Language})
"""What can be trained, by name."""
