"""Refuses, before anything starts, layouts that cannot work."""

from __future__ import annotations

from farflung.errors import UserError
from farflung.pipeline.boundaries import boundary_named
from farflung.pipeline.division import divisible, division_of
from farflung.pipeline.settings import IslandSettings
from farflung.workloads.base import Workload


def check(settings: IslandSettings, workload: Workload, seed: int) -> None:
    """Refuses a layout that cannot work. Raises UserError."""
    parts = settings.parts
    if settings.batch_size % (settings.shard * parts):
        raise UserError(
            f"batch_size is {settings.batch_size}, which {settings.shard} shards × {parts} microbatches do not divide; "
            f"choose a multiple of {settings.shard * parts}, or set --microbatches"
        )
    if settings.processes > 1 or settings.offload:
        divisible(workload)
    if settings.stages == 1:
        _check_one_stage(settings)
        return
    _check_microbatches(settings, parts)
    division = division_of(settings, divisible(workload), seed)
    divisible(workload).check_division(division.spans, division.subspace, seed)


def refuse_other_weights(before: IslandSettings, after: IslandSettings) -> None:
    """Refuses to resume with other stages or boundaries where these decide which weights exist. Raises UserError."""
    fixed = ("stages", "pipeline_schedule", "boundary")
    if all(getattr(before, name) == getattr(after, name) for name in fixed):
        return
    for boundary in (before.boundary, after.boundary):
        if boundary_named(boundary)[0]:
            raise UserError(f"boundary {boundary} decides which weights exist; resume with the same {', '.join(fixed)}")


def _check_one_stage(settings: IslandSettings) -> None:
    usual = IslandSettings()
    for name in ("pipeline_schedule", "routes", "boundary"):
        if getattr(settings, name) != getattr(usual, name):
            raise UserError(
                f"{name} is {getattr(settings, name)!r}, but one stage has no boundary; add --stages 2 or more"
            )


def _check_microbatches(settings: IslandSettings, parts: int) -> None:
    if parts < settings.stages and settings.pipeline_schedule != "gpipe":
        raise UserError(
            f"microbatches is {parts}, too few to fill {settings.stages} stages; "
            "choose at least that many, or --pipeline-schedule gpipe"
        )
    rounds = max(1, parts // settings.stages)
    if settings.pipeline_schedule in ("interleaved", "zero-bubble") and parts % rounds:
        raise UserError(
            f"microbatches is {parts}, which the {settings.pipeline_schedule} schedule cannot deal out to "
            f"{settings.stages} stages; choose a multiple of {settings.stages}"
        )
    if settings.pipeline_schedule == "zero-bubble" and (settings.shard > 1 or settings.offload):
        # Seen with torch 2.13: gradients of layers' weights that are computed later miss FSDP's reduction.
        raise UserError(
            "the zero-bubble schedule would train shards wrongly; choose another --pipeline-schedule, or --shard 1"
        )
