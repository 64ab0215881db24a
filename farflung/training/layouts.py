"""Checkpoints across layouts: what a process goes on from when a run was saved by other stages or shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farflung.networks import Traffic
from farflung.outer.fragments import split
from farflung.pipeline import Layout, Place
from farflung.training import checkpoint

Named = dict[str, Tensor]
State = dict[str, Any]


def whole_weights(paths: Sequence[Path]) -> Named:
    """All of a replica's weights, from the files of its parts."""
    return merged((state["shard"], state["model"]) for state in map(checkpoint.read, paths))


def merged(parts: Iterable[tuple[int, Named]]) -> Named:
    """Whole tensors by name, from parts of a model and the shards that they are."""
    found: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for shard, named in parts:
        for name, tensor in named.items():
            found[name][shard] = tensor
    return {
        name: torch.cat([tensor for _, tensor in sorted(shards.items())]) if len(shards) > 1 else shards.popitem()[1]
        for name, shards in found.items()
    }


def own_names(model: nn.Module, fragments: int) -> State:
    """What a checkpoint says of the tensors in it: their names, in the orders in which optimizers number them."""
    return {
        "names": [name for name, _ in model.named_parameters()],
        "fragments": [fragment.names for fragment in split(model, fragments)],
    }


def load_state(folder: Path, step: int, layout: Layout, place: Place, model: nn.Module, fragments: int) -> State:
    """What a process goes on from.

    Its own file, if it was saved by one that trained the same; else made of all of the replica's parts. Then what
    codecs remembered and rounds in flight are left out, and the state is marked as `reshaped`.
    """
    paths = checkpoint.parts_of(folder, step, place.replica)
    own = checkpoint.path_of(folder, step, layout.seat(place))
    wanted = own_names(model, fragments)
    if own in paths:
        state = checkpoint.read(own)
        if all(state[key] == names for key, names in wanted.items()) and all(
            state["model"][name].shape == parameter.shape for name, parameter in model.named_parameters()
        ):
            return state
    return _reshaped([checkpoint.read(path) for path in paths], layout, place, model, wanted)


def _reshaped(parts: list[State], layout: Layout, place: Place, model: nn.Module, wanted: State) -> State:
    cut = _cutter(layout, place)
    first, speaks = parts[0], layout.part(place) == 0
    counters = list(vars(Traffic()))

    def traffic(kind: str) -> dict[str, float]:
        return {name: sum(part[kind][name] for part in parts) if speaks else 0 for name in counters}

    return {
        **first,
        **wanted,
        "model": _model_state(model, merged((part["shard"], part["model"]) for part in parts), cut),
        "optimizer": _optimizer_state(parts, wanted["names"], cut),
        "outer": _outer_state(parts, wanted["fragments"], cut),
        "traffic": traffic("traffic"),
        "boundary_traffic": traffic("boundary_traffic"),
        "events_size": first["events_size"] if speaks else 0,
        "reshaped": True,
    }


def _cutter(layout: Layout, place: Place) -> Callable[[Tensor], Tensor]:
    """What a shard has of a whole tensor: FSDP2 deals out rows as `chunk` does."""

    def cut(whole: Tensor) -> Tensor:
        chunks = whole.chunk(layout.shards) if layout.shards > 1 else (whole,)
        return chunks[place.shard] if place.shard < len(chunks) else whole[:0]

    return cut


def _model_state(model: nn.Module, whole: Named, cut: Callable[[Tensor], Tensor]) -> Named:
    """The entries of a model's state; those of a tied head are the embeddings'."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: cut(whole[name if name in whole else tied[name]]) for name in model.state_dict()}


def _optimizer_state(parts: list[State], names: list[str], cut: Callable[[Tensor], Tensor]) -> State:
    """The inner optimizer's, which numbers parameters; its tensors are of their shapes, or single numbers."""
    found: dict[str, list[tuple[int, Named]]] = defaultdict(list)
    numbers: State = {}
    for part in parts:
        for key in {key for values in part["optimizer"]["state"].values() for key in values}:
            values = {part["names"][n]: values[key] for n, values in part["optimizer"]["state"].items()}
            if all(value.dim() == 0 for value in values.values()):
                numbers[key] = next(iter(values.values()))
            else:
                found[key].append((part["shard"], values))
    whole = {key: merged(named) for key, named in found.items()}
    state = {
        # Counters are counted on in place, so each parameter needs one of its own.
        number: {key: value.clone() for key, value in numbers.items()}
        | {key: cut(tensors[name]) for key, tensors in whole.items()}
        for number, name in enumerate(names)
        if all(name in tensors for tensors in whole.values()) and (whole or numbers)
    }
    groups = [{**group, "params": list(range(len(names)))} for group in parts[0]["optimizer"]["param_groups"]]
    return {"state": state, "param_groups": groups}


def _outer_state(parts: list[State], fragments: list[list[str]], cut: Callable[[Tensor], Tensor]) -> State:
    """The rounds', whose tensors are whole fragments, flat."""
    first = parts[0]["outer"]
    if "streams" not in first:
        return {**first, "averaging": {"share": first["averaging"]["share"], "codecs": {}}}

    def regroup(of: Callable[[State, int], Tensor]) -> list[Tensor]:
        named = merged(
            (part["shard"], _unflattened(of(part["outer"], n), names, part["model"]))
            for part in parts
            for n, names in enumerate(part["fragments"])
        )
        return [torch.cat([cut(named[name]).flatten() for name in names]) for names in fragments]

    anchors = regroup(lambda outer, n: outer["streams"][n]["anchor"])
    streams = [
        {**stream, "anchor": anchor, "averaging": {"share": stream["averaging"]["share"], "codecs": {}}}
        for stream, anchor in zip(first["streams"], anchors, strict=True)
    ]
    optimizer = first["outer"]
    lengths = {n: stream["anchor"].numel() for n, stream in enumerate(first["streams"])}
    state: dict[int, State] = {n: dict(values) for n, values in optimizer["state"].items()}
    for key in {key for n, values in state.items() for key, v in values.items() if _is_flat(v, lengths[n])}:
        flats = regroup(lambda outer, n, key=key: outer["outer"]["state"][n][key])  # type: ignore[misc]
        for n, flat in enumerate(flats):
            state[n][key] = flat
    return {**first, "streams": streams, "outer": {**optimizer, "state": state}, "flights": []}


def _is_flat(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.shape == (length,)


def _unflattened(flat: Tensor, names: list[str], model: Named) -> Named:
    sizes = [math.prod(model[name].shape) for name in names]
    return {name: piece.view(model[name].shape) for name, piece in zip(names, torch.split(flat, sizes), strict=True)}
