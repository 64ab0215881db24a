"""What a checkpoint holds of a trainer, and how a trainer goes on from it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch

from farflung.inner import names_of
from farflung.outer import Session
from farflung.training.agreement import refuse_changed_data
from farflung.training.checkpoint import Checkpoint
from farflung.training.resharding import buffer_names, whole_rounds

if TYPE_CHECKING:
    from farflung.training.trainer import Trainer


def state_of(trainer: Trainer, session: Session) -> Checkpoint:
    """All that a process must have to go on from this step bit for bit."""
    network, island, device = trainer.network, trainer.island, trainer.device
    return {
        "replica": island.coordinates.replica,
        "step": trainer.step,
        "shard": island.coordinates.shard,
        "names": names_of(trainer.optimizer),
        "model": trainer.model.state_dict(),
        "buffers": buffer_names(trainer.model),
        "optimizer": trainer.optimizer.state_dict(),
        "dealt": trainer.dealt.state_dict() if trainer.dealt else {},
        "outer": session.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "trained": trainer.progress.trained,
        "rounds": trainer.progress.rounds,
        "late": trainer.tail.state_dict(),
        "data": dict(getattr(trainer.workload, "known", {})),
        "traffic": dataclasses.asdict(network.traffic),
        "boundary_traffic": dataclasses.asdict(island.traffic),
        "clock": network.timed.clock() if network.timed else None,
        "bytes_told": trainer.progress.bytes_told,
        "elapsed": trainer.log.events.elapsed_s(),
        "events_size": trainer.log.events.size(),
    }


def restore(trainer: Trainer, state: Checkpoint, session: Session) -> None:
    """Has a trainer that was just made go on from a checkpoint. Raises UserError where its data is other data now."""
    trainer.model.load_state_dict(state["model"])
    if trainer.dealt:
        trainer.dealt.load_state_dict(state["dealt"])
    if not session.has_cells(state["outer"]):
        state["outer"] = whole_rounds(trainer.folder, trainer.step, trainer.island.coordinates.replica)
    session.load_state_dict(state["outer"])
    trainer.computing.take(state["optimizer"], state["trained"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None:
        torch.cuda.set_rng_state(state["random_cuda"], trainer.device)
    progress = trainer.progress
    progress.trained, progress.rounds, progress.bytes_told = state["trained"], state["rounds"], state["bytes_told"]
    trainer.tail.load_state_dict(state["late"])
    if known := state.get("data"):
        refuse_changed_data(known, now := cast(Any, trainer.workload).known)
        now.update(known)
    saved = (state["traffic"], state["boundary_traffic"])
    for traffic, values in zip((trainer.network.traffic, trainer.island.traffic), saved, strict=True):
        for name, value in values.items():
            setattr(traffic, name, value)
    trainer.island.restored(trainer.step)  # a tied head's copy is in no checkpoint
