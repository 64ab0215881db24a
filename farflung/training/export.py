"""A run's weights as a folder that others load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from farflung.errors import UserError, disk_errors
from farflung.files import holds_no_run
from farflung.pipeline.boundaries import boundary_named
from farflung.settings import Settings, read_settings
from farflung.training import checkpoint
from farflung.training.resharding import mean_weights, whole_weights


def export(folder: Path, target: Path) -> str:
    """Writes a model with the replicas' averaged weights to `target`; returns which weights these are.

    Of a run that has not ended, or whose averaged weights are damaged, the last whole checkpoint is averaged. Raises
    UserError.
    """
    if not (folder / "config.toml").exists():
        raise UserError(holds_no_run(folder, "there is no config.toml; give a folder that farflung train has made"))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already; give a folder that does not, or an empty one")
    settings = read_settings(folder / "config.toml")
    weights, origin = _averaged(folder, settings)
    beside = target.with_name(f"{target.name}.tmp")
    with disk_errors(f"write to {target}", "give another folder, or make room"):
        try:
            constrained_to, _ = boundary_named(settings.island.boundary)
            settings.made_workload().export(weights, beside, settings.run.seed, constrained_to)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if target.exists():
            target.rmdir()
        beside.rename(target)
    return origin


def _averaged(folder: Path, settings: Settings) -> tuple[dict[str, Any], str]:
    if averaged := checkpoint.averages(folder):
        return whole_weights(averaged), "the replicas' weights averaged at the end"
    steps = checkpoint.whole_steps(folder)
    replicas = checkpoint.replicas_of(folder)
    damaged = [path for replica in replicas for path in checkpoint.damaged(folder, replica, max(steps, default=0))]
    damaged += checkpoint.damaged_averages(folder)
    but = f" ({', '.join(map(str, damaged))} cannot be used: damaged)" if damaged else ""
    if not steps:
        raise UserError(
            f"{folder} has no whole checkpoint yet{but}; let the run go on, or set a smaller checkpoint_every"
        )
    found = {replica: checkpoint.complete(folder, steps[0], replica) for replica in replicas}
    complete = [paths for paths in found.values() if paths]
    if not complete:
        raise UserError(
            f"{folder} has only parts of replicas; copy the folders of all machines together, and export that"
        )
    of = f" of {settings.run.replicas}" if len(complete) < settings.run.replicas else ""
    return mean_weights(complete), f"the mean of {len(complete)}{of} replicas' checkpoints at step {steps[0]}{but}"
