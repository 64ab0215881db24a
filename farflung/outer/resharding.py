"""A session's state across layouts: made of those of all parts of a replica, whatever stages or shards these are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.hooks.shards import merged

State = dict[str, Any]
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """What one process of a replica has saved: its session's `state_dict`, and which of its stage's shards it was.

    Fragments are the names of their parameters, in order; shapes are its parameters'.
    """

    state: State
    shard: int
    fragments: Sequence[Sequence[str]]
    shapes: Mapping[str, torch.Size]

    def unflattened(self, flat: Tensor, names: Sequence[str]) -> Named:
        """A fragment's flat tensor as its parameters'."""
        pieces = torch.split(flat, [math.prod(self.shapes[name]) for name in names])
        return {name: piece.view(self.shapes[name]) for name, piece in zip(names, pieces, strict=True)}


def reshard(parts: Sequence[Part], fragments: Sequence[Sequence[str]], cut: Callable[[Tensor], Tensor]) -> State:
    """The state of a process with these fragments, of whose tensors it has what `cut` leaves.

    What codecs remembered and pending rounds are left out.
    """
    first = parts[0].state
    if "streams" not in first:
        return {**first, "optimizers": [_without_memory(own) for own in first["optimizers"]]}
    if not any(stream["every_steps"] for stream in first["streams"]):
        return dict(first)  # a method without rounds keeps nothing
    whole, numbers = _whole(parts)
    anchors = whole.pop("anchor")

    def flat(named: Named, names: Sequence[str]) -> Tensor:
        tensors = [named[name] if name in named else torch.zeros_like(anchors[name]) for name in names]
        return torch.cat([cut(tensor).flatten() for tensor in tensors])

    streams = [
        {**_without_memory(stream), "anchor": flat(anchors, names)}
        for stream, names in zip(first["streams"], fragments, strict=True)
    ]
    state: dict[int, State] = defaultdict(dict)
    for n, names in enumerate(fragments):
        for key, named in whole.items():
            # A fragment without a round yet has nothing, and parameters that come from there begin with noughts.
            if any(name in named for name in names):
                state[n][key] = flat(named, names)
        for key, each in numbers.items():
            if found := [each[name] for name in names if name in each]:
                state[n][key] = max(found)
    return {**first, "streams": streams, "outer": {**first["outer"], "state": dict(state)}, "flights": []}


def _without_memory(state: State) -> State:
    """The same, without what codecs remembered."""
    return {**state, "averaging": {"share": state["averaging"]["share"], "codecs": {}}}


def _whole(parts: Sequence[Part]) -> tuple[dict[str, Named], dict[str, State]]:
    """Anchors and what outer optimizers keep, of whole parameters: tensors, and single numbers, by what they are."""
    pieces: dict[str, list[tuple[int, Named]]] = defaultdict(list)
    numbers: dict[str, State] = defaultdict(dict)
    for part in parts:
        for n, names in enumerate(part.fragments):
            anchor = part.state["streams"][n]["anchor"]
            for key, value in {"anchor": anchor, **part.state["outer"]["state"].get(n, {})}.items():
                if isinstance(value, Tensor) and value.shape == anchor.shape:
                    pieces[key].append((part.shard, part.unflattened(value, names)))
                else:
                    numbers[key].update(dict.fromkeys(names, value))
    return {key: merged(found) for key, found in pieces.items()}, numbers
