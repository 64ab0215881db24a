"""Checkpoints of earlier versions, made into those of this one, version by version."""

from __future__ import annotations

from typing import Any

from farflung.formats import CHECKPOINT

State = dict[str, Any]


def migrated(state: State, version: int) -> State:
    """A checkpoint of some version as `training/checkpoint.py` describes it."""
    for step in _STEPS[version : CHECKPOINT.version]:
        state = step(state)
    return state


def _from_0(state: State) -> State:
    """Fragments' `every` and `delay` got units; pending rounds tell offer and result apart."""
    outer = state.get("outer", {})
    if "streams" not in outer:
        return state  # gradients are averaged as they were
    streams = [
        {**stream, "every_steps": stream["every"], "delay_steps": stream["delay"]} for stream in outer["streams"]
    ]
    flights = [_flight_from_0(flight) for flight in outer["flights"]]
    return {**state, "outer": {**outer, "streams": streams, "flights": flights}}


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
