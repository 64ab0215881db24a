"""Checkpoints of earlier versions, made into those of this one, version by version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farflung.formats import CHECKPOINT

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


_STEPS = (_from_0,)
