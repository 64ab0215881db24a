"""Refuses, before anything starts, layouts that cannot work."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.errors import UserError, counted
from farflung.pipeline.boundaries import boundary_named
from farflung.pipeline.division import divisible, division_of
from farflung.pipeline.settings import BETWEEN_STAGES, MOST_TOGETHER, IslandSettings, IslandShape
from farflung.workloads.base import Divisible, Span, Workload


def check(settings: IslandSettings, workload: Workload, seed: int) -> None:
    """Refuses layouts that cannot work. Raises UserError."""
    shapes = settings.shapes()
    if settings.islands:
        _check_unlike(settings, shapes)
    for shape in dict.fromkeys(shapes):
        _check_shape(settings.of(shape), workload, seed)


def check_stepping(settings: IslandSettings) -> None:
    """Refuses a way to step where there is no swarm. Raises UserError."""
    if not settings.swarm and settings.stepping != IslandSettings.stepping:
        raise UserError(
            f"stepping is {settings.stepping!r}, but only a swarm's peers choose; add --swarm or leave it out"
        )


def _check_unlike(settings: IslandSettings, shapes: Sequence[IslandShape]) -> None:
    if settings.routes == "random":
        raise UserError("routes is 'random', which needs islands of one shape; give --stages instead of --islands")
    unlike = len({shape.stages for shape in shapes}) > 1
    if unlike and boundary_named(settings.boundary)[0]:
        raise UserError(
            f"with boundary {settings.boundary} the stages decide which weights exist, and islands differ in them; "
            "choose another --boundary, or the same stages in all"
        )
    if all(shape.stages == 1 for shape in shapes):
        _check_one_stage(settings)


def _check_shape(settings: IslandSettings, workload: Workload, seed: int) -> None:
    parts = settings.parts
    check_stepping(settings)
    if settings.swarm:
        _check_swarm(settings, divisible(workload))
    if settings.batch_size % (settings.shard * parts):
        shards = counted(settings.shard, "shard")
        raise UserError(
            f"batch_size is {settings.batch_size}, which {shards} × {parts} microbatches do not divide; "
            f"choose a multiple of {settings.shard * parts}, or set --microbatches"
        )
    if settings.divided or settings.offload:
        divisible(workload)
    if settings.compile and settings.pipeline_schedule == "zero-bubble":
        raise UserError("the zero-bubble schedule cannot divide a compiled backward pass; leave out --compile")
    if settings.stages == 1:
        _check_one_stage(settings)
        return
    if not settings.swarm:
        _check_microbatches(settings, parts)
    division = division_of(settings, divisible(workload), seed)
    divisible(workload).check_division(division.spans, division.subspace, seed)


def refuse_other_weights(before: IslandSettings, after: IslandSettings) -> None:
    """Refuses to resume with other stages or boundaries where these decide which weights exist. Raises UserError."""
    fixed = ("islands", "stages", "pipeline_schedule", "boundary")
    if all(getattr(before, name) == getattr(after, name) for name in fixed):
        return
    for boundary in (before.boundary, after.boundary):
        if boundary_named(boundary)[0]:
            raise UserError(f"boundary {boundary} decides which weights exist; resume with the same {', '.join(fixed)}")


def _check_swarm(settings: IslandSettings, workload: Divisible) -> None:
    """Refuses what peers that each serve one stage, and meet any others, cannot do."""
    if settings.stages == 1:
        raise UserError("a swarm has two stages or more; say how many with --stages, or leave out --swarm")
    if settings.stepping == "asynchronous" and settings.parts > 1:
        raise UserError(
            "asynchronous steps are of one microbatch each, of --batch-size samples; leave out --microbatches"
        )
    if settings.stepping == "synchronous" and settings.parts > MOST_TOGETHER:
        raise UserError(
            f"microbatches is {settings.parts}, but a step that all peers take together has at most {MOST_TOGETHER}; "
            "choose fewer, each of more samples"
        )
    usual = IslandSettings()
    if settings.compile:
        raise UserError(
            "a swarm's peers compute eagerly, since their microbatches come one by one; leave out --compile"
        )
    for name in ("shard", "gateway", "pipeline_schedule", "routes", "offload"):
        if (value := getattr(settings, name)) != getattr(usual, name):
            raise UserError(f"{name} is {value!r}, but a peer of a swarm is one process with one stage; leave it out")
    outline = workload.outline()
    if workload.tied_weight(outline) is not None:
        raise UserError("the model's head is its embeddings, which peers of two stages cannot share; choose another")
    if workload.piece(outline, Span(0, 0, first=True, last=False), half=False).sums:
        raise UserError("a mixture of experts has a loss of all stages, which a swarm does not pass on; choose another")


def _check_one_stage(settings: IslandSettings) -> None:
    usual = IslandSettings()
    for name in BETWEEN_STAGES:
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
