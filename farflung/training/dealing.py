"""What replicas that each train some units of one model must have in common."""

from __future__ import annotations

from farflung.errors import UserError
from farflung.settings import Settings


def check_dealing(settings: Settings) -> None:
    """Refuses to deal out a model that so many replicas cannot share, or that is divided already. Raises UserError."""
    if (dealing := settings.method().dealing) is None:
        return
    island, name = settings.island, settings.rounds.method
    for setting, why in {
        "divided": "replicas of one process each: leave out stages and shards",
        "batched_replicas": "replicas that compute apart: leave out batched_replicas",
        "compile": "models whose weights change places: leave out compile",
    }.items():
        if getattr(island, setting):
            raise UserError(f"{name} deals out units among {why}, or choose another method")
    if settings.inner.tail_average:
        raise UserError(f"{name} has no two rounds in which a replica holds the same units; leave out tail_average")
    if settings.run.replicas > 1:
        dealing.check(settings.made_workload().outline(), settings.run.replicas)
