"""Workloads by name, as settings give them; a package adds one with an entry point in `farflung.workloads`."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from farflung.registry import Registry
from farflung.tables import hints_of, in_toml
from farflung.workloads.clicks.workload import Recommender
from farflung.workloads.graph.workload import Graph
from farflung.workloads.images.workload import Images
from farflung.workloads.language import Language

if TYPE_CHECKING:
    from farflung.workloads.base import Workload


def _check(kind: type[Workload]) -> None:
    if not (callable(kind) and is_dataclass(getattr(kind, "Settings", None))):
        raise TypeError(f"it is {kind!r}, which is no farflung.workloads.Workload with a dataclass of Settings")
    kind.Settings()
    for name in (field.name for field in fields(kind.Settings)):
        if not in_toml(hint := hints_of(kind.Settings)[name]):
            raise TypeError(
                f"its setting {name} is {getattr(hint, '__name__', hint)}, which a run's config.toml cannot hold; make "
                "it a str, int, float, bool or Literal, or a list or tuple of these"
            )


WORKLOADS: Registry[type[Workload]] = Registry(
    "workload",
    {
        "language": Language,
        "graph": Graph,
        "clicks": Recommender,
        "images": Images,
    },
    _check,
    by_path=True,
)
"""What can be trained, by name; MODULE:NAME is a class of the user's own."""
