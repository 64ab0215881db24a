"""Checkpoints of earlier versions, made into those of this one, version by version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.cells import Shape, layers_of
from farflung.formats import CHECKPOINT, KEY, ROUNDS

State = dict[str, Any]


def migrated(state: State, version: int) -> State:
    """A checkpoint of some version as `training/checkpoint.py` describes it."""
    for step in _STEPS[version : CHECKPOINT.version]:
        state = step(state)
    return state


def _from_0(state: State) -> State:
    """Paces got units, pending rounds tell offer and result apart, and codecs number their parts."""
    outer = state.get("outer", {})  # averaged weights have none
    if "optimizers" in outer:
        optimizers = [
            {**one, "averaging": _averaging_from_0(one["averaging"], lambda codec: {"0": _codec_from_0(codec)})}
            for one in outer["optimizers"]
        ]
        return {**state, "outer": {**outer, "optimizers": optimizers}}
    if "streams" not in outer:
        return state
    streams = [
        {
            **stream,
            "every_steps": stream["every"],
            "delay_steps": stream["delay"],
            "averaging": _averaging_from_0(stream["averaging"], _codec_from_0),
        }
        for stream in outer["streams"]
    ]
    flights = [_flight_from_0(flight) for flight in outer["flights"]]
    return {**state, "outer": {**outer, "streams": streams, "flights": flights}}


def _averaging_from_0(averaging: State, codec_from_0: Callable[[State], State]) -> State:
    return {**averaging, "codecs": {use: codec_from_0(codec) for use, codec in averaging["codecs"].items()}}


def _codec_from_0(codec: State) -> State:
    """What one codec remembers; those in a chain were numbered already."""
    if "turns" in codec:
        return _modulo_from_0(codec)
    names = {"error": "residual", "codec": "0", "first": "0", "second": "1"}
    parts = ("codec", "first", "second", *map(str, range(len(codec))))
    return {names.get(name, name): _codec_from_0(value) if name in parts else value for name, value in codec.items()}


def _modulo_from_0(codec: State) -> State:
    ranges = {"reference": "expected", "news_grow": "grows"}
    kept = {name: codec[ranges.get(name, name)] for name in ("ranges", "farthest", "lately", "news", *ranges)}
    return {"tracker": kept, "every": codec["turns"], **{name: codec[name] for name in ("round", "sent", "count")}}


def _flight_from_0(flight: State) -> State:
    of_round = ("fragment", "round", "group", "started_step", "started")
    of_offer = ("message", "anchor", "applied", "own", "at_start")
    of_result = ("group", "outcome", "reason", "compression_error", "apart")
    return {
        **{name: flight[name] for name in of_round},
        "lands_at_step": flight["lands_at"],
        "finished": flight["pending"],
        "offer": {"fault": "", **{name: flight[name] for name in of_offer}},
        "exchange": {"mean": None, **{name: flight[name] for name in of_result}},
    }


def _from_1(state: State) -> State:
    """What rounds keep lies in cells; codecs remember cells, where they remembered a message's tensors."""
    names, outer = state.pop("fragments", []), state.get("outer", {})
    shapes = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    if "optimizers" in outer:
        return {**state, "outer": _gradients_from_1(outer, {name: shapes[name] for name in shapes if name in names[0]})}
    if "streams" not in outer:
        return state
    cells: State = {}
    for number, (stream, held) in enumerate(zip(outer["streams"], names, strict=True)):
        kept = {"anchor": stream["anchor"]}
        if stream["rounded_off"] is not None:
            kept["rounded off"] = stream["rounded_off"]
        kept |= {f"outer {name}": value for name, value in outer["outer"]["state"].get(number, {}).items()}
        for place, flight in enumerate(outer["flights"]):
            if flight["fragment"] == number:
                tensors = {name: value for name, value in flight["offer"].items() if isinstance(value, Tensor)}
                kept |= {f"pending {place} {name}": value for name, value in tensors.items()}
        cells |= _cells_from_1(kept, stream["averaging"]["codecs"], {name: shapes[name] for name in held})
    kept = {name: value for name, value in outer.items() if name not in ("outer", "flights", "streams")}
    rounds = {
        "groups": outer["outer"]["param_groups"],
        "fragments": [_pace_from_1(stream) for stream in outer["streams"]],
        "pending": [_pending_from_1(flight) for flight in outer["flights"]],
        "cells": cells,
    }
    return {**state, "outer": kept | rounds | {KEY: ROUNDS.version}}


def _gradients_from_1(outer: State, shapes: dict[str, Shape]) -> State:
    (one,) = outer["optimizers"]  # a run has one
    codecs = {use: codec["0"] for use, codec in one["averaging"]["codecs"].items() if "0" in codec}  # without notes
    ever = dict(zip(shapes, one["ever_present"], strict=True))
    optimizer = {**{name: one[name] for name in ("step", "faults", "exchanges")}, "ever_present": ever}
    cells = _cells_from_1({}, codecs, shapes)
    return {**outer, "optimizers": [optimizer], "cells": cells, KEY: ROUNDS.version}


def _cells_from_1(kept: State, codecs: State, shapes: dict[str, Shape]) -> State:
    """Flat tensors of parameters with these shapes, cell by cell, and what one codec of all of them remembers."""
    cells = [cell for layer in layers_of(shapes).values() for cell in layer]
    places = {name: place for place, name in enumerate(shapes)}
    found: State = {}
    for cell in cells:
        own = [places[name] for name in dict.fromkeys(piece.parameter for piece in cell.pieces)]
        whole = {use: codec for use, codec in codecs.items() if use == "whole" and not _looks_at_all(codec)}
        remembered = {use: _of_cell(codec, own, len(shapes)) for use, codec in whole.items()}
        found[cell.name] = {**kept, "codecs": remembered, "values": cell.numel}
    for name, value in kept.items():
        if isinstance(value, Tensor) and value.dim():
            parts = torch.split(value.view(-1, sum(cell.numel for cell in cells)), [c.numel for c in cells], dim=1)
            for cell, part in zip(cells, parts, strict=True):
                found[cell.name][name] = part.flatten()
    return found


def _looks_at_all(codec: State) -> bool:
    """Whether a codec, or a part of it, remembers a message as one row; it begins anew."""
    return "tracker" in codec or any(_looks_at_all(part) for part in codec.values() if isinstance(part, dict))


def _of_cell(codec: State, places: list[int], count: int) -> State:
    """What a codec remembers of some of a message's tensors."""
    return {
        name: [value[place] for place in places]
        if isinstance(value, list) and len(value) == count
        else _of_cell(value, places, count)
        if isinstance(value, dict)
        else value
        for name, value in codec.items()
    }


def _pace_from_1(stream: State) -> State:
    kept = ("every_steps", "delay_steps", "next_start", "rounds", "trained", "met", "lost")
    sync = {name: stream[name] for name in kept}
    return {"sync": sync, "adaptation": stream["adaptation"], "share": stream["averaging"]["share"]}


def _pending_from_1(flight: State) -> State:
    tensors = [name for name, value in flight["offer"].items() if isinstance(value, Tensor)]
    offer = {name: value for name, value in flight["offer"].items() if name not in tensors}
    return {**flight, "offer": offer, "tensors": tensors}


_STEPS = (_from_0, _from_1)
