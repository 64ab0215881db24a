"""Checkpoints across layouts: the state that a process resumes from when a run was saved by other stages or shards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.errors import UserError
from farflung.hooks.shards import merged
from farflung.hooks.trained import trainable
from farflung.inner import names_of
from farflung.networks import Traffic
from farflung.pipeline import Mesh, MeshCoordinates
from farflung.pipeline.local_model import persistent_buffers
from farflung.training import checkpoint
from farflung.training.checkpoint import Checkpoint

Named = dict[str, Tensor]
State = dict[str, Any]


def whole_weights(paths: Sequence[Path]) -> Named:
    """All of a replica's weights, from the files of its parts."""
    return _whole_model([checkpoint.read(path) for path in paths])


def mean_weights(replicas: Sequence[Sequence[Path]]) -> Named:
    """The mean of some replicas' weights, from the files of the parts of each; only one of them is read at a time.

    Of what not all of them hold, such as dealt tables or the rest beside a core, the mean of those who do.
    """
    mean, holders = dict[str, Tensor](), Counter[str]()
    for paths in replicas:
        for name, value in whole_weights(paths).items():
            share = value.double() / len(replicas) if value.is_floating_point() else value
            mean[name] = mean[name] + share if name in mean and value.is_floating_point() else share
            holders[name] += 1
    few = {name: count for name, count in holders.items() if count < len(replicas) and mean[name].is_floating_point()}
    return mean | {name: mean[name] * (len(replicas) / count) for name, count in few.items()}


def _whole_model(parts: list[Checkpoint]) -> Named:
    buffers = {name for part in parts for name in part["buffers"]}
    return merged(((part["shard"], part["model"]) for part in parts), buffers)


def buffer_names(model: nn.Module) -> list[str]:
    """The names of the buffers in a model's state, which shards have whole."""
    return sorted(persistent_buffers(model))


def load_state(
    folder: Path,
    step: int,
    mesh: Mesh,
    coordinates: MeshCoordinates,
    model: nn.Module,
    optimizer: Optimizer,
) -> Checkpoint:
    """What a process goes on from.

    Its own file, if it was saved by one that trained the same: its large tensors are read one by one as they are used.
    Else it is made of all of the replica's parts. Raises UserError where parts of another layout lie elsewhere.
    """
    paths = checkpoint.parts_of(folder, step, coordinates.replica)
    own = checkpoint.path_of(folder, step, mesh.file_stem(coordinates))
    names = names_of(optimizer)
    if own in paths:
        state = _in_its_place(checkpoint.outline(own), own, step, coordinates.replica)
        alike = (state["model"][name].shape == one.shape for name, one in trainable(model).items())
        if state["names"] == names and all(alike):
            return state
    groups = optimizer.state_dict()["param_groups"]
    return _reshaped(_all_parts(folder, step, coordinates.replica), mesh, coordinates, model, names, groups)


def whole_rounds(folder: Path, step: int, replica: int) -> State:
    """The state of a replica's rounds with the cells of all of its processes, as one needs it that keeps others now.

    Raises UserError where some of its parts lie elsewhere.
    """
    return _rounds_state([part["outer"] for part in _all_parts(folder, step, replica)])


def _all_parts(folder: Path, step: int, replica: int) -> list[Checkpoint]:
    paths = checkpoint.complete(folder, step, replica)
    there = checkpoint.path_of(folder, step, f"replica-{replica}").parent
    if not paths and not any([*there.glob(f"replica-{replica}.pt"), *there.glob(f"replica-{replica}-*.pt")]):
        raise UserError(
            f"{folder} has no checkpoint of step {step} of replica {replica} any more, which another process that "
            "trains this run may have removed; wait for it, or stop it, and start again"
        )
    if not paths:
        raise UserError(
            f"{folder} has only parts of replica {replica} at step {step}, of other stages, shards, another schedule "
            "or gateway; copy the folders of all machines together, or go on as these were saved"
        )
    return [_in_its_place(checkpoint.read(path), path, step, replica) for path in paths]


def _in_its_place(state: Checkpoint, path: Path, step: int, replica: int) -> Checkpoint:
    """A checkpoint, if it is of the replica and step as which it lies there. Raises UserError."""
    of, at = state.get("replica", replica), state.get("step", step)
    if (of, at) != (replica, step):
        raise UserError(
            f"{path} is of replica {of} at step {at}; copy replica {replica}'s own file of step {step} there, or "
            "remove it to use what is older"
        )
    return state


def _reshaped(
    parts: list[Checkpoint],
    mesh: Mesh,
    coordinates: MeshCoordinates,
    model: nn.Module,
    names: list[str],
    groups: list[State],
) -> Checkpoint:
    shards = mesh.shape(coordinates.replica).shards

    def cut(whole: Tensor) -> Tensor:
        """What a shard has of a whole tensor: FSDP2 deals out rows as `chunk` does."""
        if shards == 1 or not whole.dim():
            return whole
        chunks = whole.chunk(shards)
        return chunks[coordinates.shard] if coordinates.shard < len(chunks) else whole[:0]

    first, speaks = parts[0], mesh.part(coordinates) == 0
    means = merged((part["shard"], part["late"]["mean"]) for part in parts)
    late = {name: cut(means[name]) for name in names if name in means}
    counters = list(vars(Traffic()))

    def traffic(kind: Literal["traffic", "boundary_traffic"]) -> dict[str, float]:
        return {name: sum(part[kind][name] for part in parts) if speaks else 0 for name in counters}

    return {
        **first,
        "names": names,
        "model": _model_state(model, _whole_model(parts), cut),
        "buffers": buffer_names(model),
        "optimizer": {"state": _optimizer_state(parts, names, cut), "param_groups": groups},
        "outer": _rounds_state([part["outer"] for part in parts]),
        "late": {**first["late"], "mean": late},
        "traffic": traffic("traffic"),
        "bytes_told": int(traffic("traffic")["bytes_sent"]),
        "boundary_traffic": traffic("boundary_traffic"),
        "events_size": first["events_size"] if speaks else 0,
    }


def _rounds_state(parts: list[State]) -> State:
    """The state of a replica's rounds, with the cells of all of its keepers."""
    state = {**parts[0], "cells": _union(part.get("cells", {}) for part in parts)}
    if optimizers := parts[0].get("optimizers"):  # whose gradients are averaged
        ever = [_union(part["optimizers"][place]["ever_present"] for part in parts) for place in range(len(optimizers))]
        state["optimizers"] = [{**one, "ever_present": names} for one, names in zip(optimizers, ever, strict=True)]
    return state


def _union(tables: Iterable[State]) -> State:
    return {name: value for table in tables for name, value in table.items()}


def _model_state(model: nn.Module, whole: Named, cut: Callable[[Tensor], Tensor]) -> Named:
    """The entries of a model's state; those of a tied head are the embeddings'."""
    tied, buffers = getattr(model, "all_tied_weights_keys", {}), buffer_names(model)
    found = {name: whole[name if name in whole else tied[name]] for name in model.state_dict()}
    return {name: tensor if name in buffers else cut(tensor) for name, tensor in found.items()}


def _optimizer_state(parts: list[Checkpoint], names: list[str], cut: Callable[[Tensor], Tensor]) -> dict[int, Named]:
    """What the inner optimizer keeps of each parameter, by number: tensors of its shape, or single numbers."""
    found: dict[str, list[tuple[int, Named]]] = defaultdict(list)
    for part in parts:
        kept = {part["names"][number]: values for number, values in part["optimizer"]["state"].items()}
        for key in {key for values in kept.values() for key in values}:
            named = {name: values[key] for name, values in kept.items() if key in values}
            found[key].append((part["shard"], named))
    whole = {key: merged(named) for key, named in found.items()}
    state: dict[int, Named] = {
        number: {key: cut(tensors[name]) for key, tensors in whole.items() if name in tensors}
        for number, name in enumerate(names)
    }
    return {number: kept for number, kept in state.items() if kept}
