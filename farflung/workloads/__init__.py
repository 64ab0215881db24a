"""Floor 2: what is trained, and on what data. Read `base.py` first."""

from dataclasses import is_dataclass

from farflung.registry import Registry
from farflung.workloads.base import Divisible, Workload
from farflung.workloads.language import Language

__all__ = ["WORKLOADS", "Divisible", "Language", "Workload"]


def _check(kind: type[Workload]) -> None:
    if not (callable(kind) and is_dataclass(getattr(kind, "Settings", None))):
        raise TypeError(f"it is {kind!r}, which is no farflung.workloads.Workload with a dataclass of Settings")
    kind.Settings()


WORKLOADS: Registry[type[Workload]] = Registry("workload", {"language": Language}, _check)
"""What can be trained, by name."""
