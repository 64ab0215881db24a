"""Refusing, before anything starts, what cannot be divided."""

from __future__ import annotations

from typing import Any

from farflung.config import Config
from farflung.errors import UserError
from farflung.pipeline.balance import Span
from farflung.pipeline.boundaries import boundary_named
from farflung.pipeline.division import PIECES_EACH, microbatches_of
from farflung.pipeline.split import anatomy, check_split, keep
from farflung.pipeline.subspace import check_confined, confine, subspace_of
from farflung.workloads import models
from farflung.workloads.tokenizers import Tokenizer


def check(config: Config, tokenizer: Tokenizer) -> None:
    """Refuses a layout that cannot work. Raises UserError."""
    parts = microbatches_of(config)
    pieces = config.stages * PIECES_EACH[config.schedule]
    if config.batch_size % (config.shard * parts):
        raise UserError(
            f"batch_size is {config.batch_size}, which {config.shard} shards × {parts} microbatches do not divide; "
            f"choose a multiple of {config.shard * parts}, or set --microbatches"
        )
    if config.inner == "muon" and config.shard > 1:
        raise UserError(
            "inner muon needs whole matrices, of which a shard has only rows; choose --shard 1, or begin with adamw"
        )
    if config.stages == 1:
        _check_one_stage(config)
    if config.stages * config.shard > 1 and config.network == "simulated":
        raise UserError("stages and shards need real processes; leave out --network simulated")
    if config.offload and config.network == "simulated":
        raise UserError("offload needs real processes; leave out --network simulated")
    if config.stages == 1:
        return
    _check_microbatches(config, parts)
    settings = models.model_config(config, tokenizer)
    spans = check_split(settings, pieces)
    rank, _ = boundary_named(config.boundary)
    if rank:
        _check_subspace(config, settings, spans, rank)


def _check_one_stage(config: Config) -> None:
    for name, usual in (("schedule", "1f1b"), ("routes", "fixed"), ("boundary", "float32")):
        if getattr(config, name) != usual:
            raise UserError(
                f"{name} is {getattr(config, name)!r}, but one stage has no boundary; add --stages 2 or more"
            )


def _check_microbatches(config: Config, parts: int) -> None:
    if parts < config.stages and config.schedule != "gpipe":
        raise UserError(
            f"microbatches is {parts}, too few to fill {config.stages} stages; "
            "choose at least that many, or --schedule gpipe"
        )
    rounds = max(1, parts // config.stages)
    if config.schedule in ("interleaved", "zero-bubble") and parts % rounds:
        raise UserError(
            f"microbatches is {parts}, which the {config.schedule} schedule cannot deal out to {config.stages} stages; "
            f"choose a multiple of {config.stages}"
        )
    if config.schedule == "zero-bubble" and (config.shard > 1 or config.offload):
        # Seen with torch 2.13: gradients of layers' weights that are computed later miss FSDP's reduction.
        raise UserError("the zero-bubble schedule would train shards wrongly; choose another --schedule, or --shard 1")


def _check_subspace(config: Config, settings: Any, spans: list[Span], rank: int) -> None:
    """Tries the first layer; the others are seen to be made alike, without memory for them."""
    if config.pretrained:
        raise UserError("boundary subspace: published weights do not lie in one; remove pretrained")
    subspace = subspace_of(settings, rank, config.seed)
    model = models.outline(settings)
    parts = anatomy(model)
    confine(model, parts[parts.layers], subspace, spans[-1].begin)
    keep(model, Span(0, 1, first=True, last=False))
    models.materialise(model, config.seed)
    decoder = anatomy(model)
    check_confined(model.get_decoder(), decoder[decoder.layers], subspace, up_to=1)
