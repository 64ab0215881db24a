"""A run's weights as a folder that others load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import UserError, counted
from farflung.files import event_files, holds_no_run, new_beside, refuse_taken
from farflung.formats import OWN_LOOP
from farflung.lazy import Later
from farflung.settings import Settings, read_settings
from farflung.tables import toml_table

if TYPE_CHECKING:
    from farflung.joint import kinds
    from farflung.pipeline import boundaries
    from farflung.training import checkpoint, dealt_tables, events, resharding
    from farflung.workloads import Language, Workload
else:
    kinds = Later("farflung.joint.kinds")
    boundaries, checkpoint = Later("farflung.pipeline.boundaries"), Later("farflung.training.checkpoint")
    events, resharding = Later("farflung.training.events"), Later("farflung.training.resharding")
    dealt_tables = Later("farflung.training.dealt_tables")


def export(folder: Path, target: Path, best: bool = False, adapter: bool = False, core: bool = False) -> str:
    """Writes a model with the replicas' averaged weights to `target`, or its `adapter` or `core`; returns which.

    The folder may be the ticket of a swarm, whose peers are then asked.
    Of a run that has not ended, or whose averaged weights are damaged, the last whole checkpoint is averaged, or the
    last one of each independent replica; the `best` ones by what they were judged by if asked for. Raises UserError.
    """
    refuse_taken(target, "give a folder that does not, or an empty one")
    if folder.is_file():
        settings, weights, origin = _of_swarm(folder, best)
    else:
        settings, weights, origin = _of_folder(folder, best)
    workload = settings.made_workload()
    if core or settings.core.core:
        weights = _ordinary(settings, workload, weights, core)
    _write(settings, workload, weights, target, adapter)
    return origin


def _of_folder(folder: Path, best: bool) -> tuple[Settings, dict[str, Any], str]:
    if not (folder / "config.toml").exists():
        raise UserError(holds_no_run(folder, "there is no config.toml; give a folder that farflung train has made"))
    if toml_table(folder / "config.toml").get("workload") == OWN_LOOP:
        raise UserError(
            f"{folder} is of a training loop of its own, whose model farflung does not know; load "
            f"farflung.RunFolder({str(folder)!r}).weights() into that model, and save it: "
            f"{_own_weights(folder)}"
        )
    settings = read_settings(folder / "config.toml")
    _refuse_best(settings, best)
    if settings.island.swarm and not checkpoint.averages(folder):
        return _of_swarm(folder / "run.ticket", best)
    return settings, *(_best(folder, settings) if best else _averaged(folder, settings))


def _of_swarm(path: Path, best: bool) -> tuple[Settings, dict[str, Any], str]:
    """What the living peers of a ticket's swarm have."""
    from farflung.networks.peers.ticket import NobodyAnswersError
    from farflung.training.gathering import whole_swarm
    from farflung.training.onlooker import ticket_in
    from farflung.training.peer import model_of, ticket_settings

    ticket = ticket_in(path)
    settings = ticket_settings(ticket)
    if not settings.island.swarm:
        raise UserError(f"{ticket.name} is no swarm: each of its peers has all of the model; export one's run folder")
    _refuse_best(settings, best)
    try:
        return settings, *whole_swarm(ticket, settings, model_of(settings))
    except NobodyAnswersError as error:
        heads = "at a run's end the run folders of those that served stage 0 have all stages: export one of these"
        raise UserError(f"{error}; {heads}") from error


def _refuse_best(settings: Settings, best: bool) -> None:
    if best and settings.island.swarm:
        raise UserError("no peer of a swarm has all of a checkpoint to judge; leave out --best")


def _ordinary(settings: Settings, workload: Workload, weights: dict[str, Any], alone: bool) -> dict[str, Any]:
    """The weights of a model with a core under an ordinary one's names, or of the core alone; the workload's, then."""
    if not settings.core.core:
        raise UserError("this run has trained all of its model as one, and no core; leave out --core")
    core, outline = kinds.core_named(settings.core.core), workload.outline()
    core.divide(outline)
    if not alone:
        return kinds.whole(weights, outline)
    core.narrow(_of_language(workload, "--core").config)
    return core.ordinary(weights, outline)


def _write(settings: Settings, workload: Workload, weights: dict[str, Any], target: Path, adapter: bool) -> None:
    with new_beside(target) as new:
        if adapter:
            _of_language(workload, "--adapter").export_adapter(weights, new)
        else:
            constrained_to, _ = boundaries.boundary_named(settings.island.boundary)
            workload.export(weights, new, settings.run.seed, constrained_to)
        if target.exists():
            target.rmdir()
        new.rename(target)


def _own_weights(folder: Path) -> str:
    if not (steps := checkpoint.whole_steps(folder)):
        return "but there is no whole checkpoint yet; let the loop call save() of its run folder"
    return f"these are the mean of {counted(len(checkpoint.replicas_of(folder)), 'replica')} at step {steps[0]}"


def _of_language(workload: Workload, flag: str) -> Language:
    """A workload whose model can be written in the way of a flag. Raises UserError."""
    from farflung.workloads.language import Language

    if not isinstance(workload, Language):
        raise UserError(f"{type(workload).__name__} trains no language model, which {flag} is for; leave it out")
    return workload


def _averaged(folder: Path, settings: Settings) -> tuple[dict[str, Any], str]:
    if averaged := checkpoint.averages(folder):
        origin = "the stages' weights" if settings.island.swarm else "the replicas' weights averaged"
        told = "the weights that the observer judged best" if settings.run.observe else f"{origin} at the end"
        return resharding.whole_weights(averaged), told
    # Independent replicas have run folders of their own.
    homes = sorted({path.parent.parent for path in event_files(folder)})
    last = [(home, step) for home in homes if (step := checkpoint.last_sound(home)) is not None]
    but = f" ({', '.join(map(str, damaged))} cannot be used: damaged)" if (damaged := _damaged(folder, homes)) else ""
    if not last:
        raise UserError(
            f"{folder} has no whole checkpoint yet{but}; let the run go on, or set a smaller checkpoint_every"
        )
    found = [
        checkpoint.complete(home, step, replica) for home, step in last for replica in checkpoint.replicas_of(home)
    ]
    complete = list(filter(None, found))
    if not complete:
        raise UserError(
            f"{folder} has only parts of replicas; copy the folders of all machines together, and export that"
        )
    of = f" of {settings.run.replicas}" if len(complete) < settings.run.replicas else ""
    steps = sorted({step for _, step in last})
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    origin = f"the mean of {len(complete)}{of} replicas' checkpoints at {at}{but}"
    return _mean_weights(complete, settings), origin


def _best(folder: Path, settings: Settings) -> tuple[dict[str, Any], str]:
    """The mean of the replicas' weights at the step where they were judged best; independent ones at a step each."""
    figure = settings.figure
    homes = sorted({path.parent.parent for path in event_files(folder)})
    found = [(home, *best) for home in homes if (best := checkpoint.best_step(home, figure))]
    if not found:
        told = [events.scores(home, one) for home in homes for one in checkpoint.replicas_of(home)]
        if (values := [value for one in told for value in one.values()]) and not any(map(math.isfinite, values)):
            raise UserError(f"no {figure.name} of {folder} is finite, so that none is the best; leave out --best")
        raise UserError(
            f"{folder} has no checkpoint of a step at which all replicas were judged; let the run go on, with "
            "--checkpoint-every a multiple of --eval-every, or leave out --best"
        )
    parts = [checkpoint.complete(home, step, one) for home, step, _ in found for one in checkpoint.replicas_of(home)]
    if not all(parts):
        raise UserError(
            f"{folder} has only parts of replicas; copy the folders of all machines together, and export that"
        )
    steps, score = sorted({step for _, step, _ in found}), sum(score for *_, score in found) / len(found)
    at = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    origin = f"the mean of the checkpoints of {counted(len(parts), 'replica')} at {at}, the best"
    return _mean_weights(parts, settings), f"{origin}: {figure.told(f'{score:.4f}')}"


def _mean_weights(replicas: Sequence[Sequence[Path]], settings: Settings) -> dict[str, Any]:
    """The mean of some replicas' checkpoints; of those that have dealt out one model, that model."""
    mean = resharding.mean_weights(replicas)
    workload = settings.made_workload()
    if dealt_tables.crossing_of(workload) and not workload.outline().state_dict().keys() <= mean.keys():
        raise UserError(
            "some of the tables that replicas have dealt out lie elsewhere; copy the folders of all machines together"
        )
    if dealing := settings.method().dealing:
        dealing.assemble(mean, workload.outline(), len(replicas))
    return mean


def _damaged(folder: Path, homes: Sequence[Path]) -> list[Path]:
    """The files that would be later than what is used in the folders of a run's replicas."""
    damaged = checkpoint.damaged_averages(folder)
    for home in homes:
        last = checkpoint.last_sound(home) or 0
        damaged += [
            path for replica in checkpoint.replicas_of(home) for path in checkpoint.damaged(home, replica, last)
        ]
    return damaged
