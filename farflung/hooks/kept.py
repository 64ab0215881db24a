"""An optimizer's state besides moments: copies of the weights, initial weights, and first values."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farflung.hooks.hidden import sample
from farflung.hooks.shards import own_of
from farflung.hooks.trained import held_by

NEAR = 0.25
"""State may be a copy of the weights if its squared distance from them is less than this part of their square."""

PATIENCE_STEPS = 30
"""Such state counts as initial weights once so many steps have moved the weights but not the state."""

Values = dict[nn.Parameter, Tensor]


@dataclass
class _Still:
    """State near the weights that has not been seen to move by itself."""

    seen: Values
    """Samples of it as it was left."""
    since: int
    """Moves of the weights when it was first seen."""
    originals: Values = field(default_factory=dict)
    """Its value before rounds changed it."""
    settled: bool = False
    """Whether it is known to stand still."""


class Kept:
    """One optimizer's state, as far as rounds must know about it.

    State near the weights counts as a copy and is changed with them, until the weights have moved for a while and it
    has not. Then it counts as initial weights, and gets its old value back. State that is near and moves by itself is a
    copy.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._copies: list[str] = []
        self._others: list[str] = []
        self._still: dict[str, _Still] = {}
        self._looked = False
        self._weights: Tensor | None = None
        self._moves: Tensor | int = 0
        self._first: dict[int, dict[str, Any]] = {}
        self._like_weights: list[str] = []

    @property
    def followers(self) -> list[str]:
        """The names of the state that changes with rounds."""
        return self._copies + [name for name, still in self._still.items() if not still.settled]

    @torch.no_grad()
    def begin(self) -> None:
        """Records the state that the optimizer has before its first step."""
        state, held = self.optimizer.state, held_by(self.optimizer)
        each = {name: self._values(name) for parameter in held for name in state.get(parameter, {})}
        self._like_weights = [name for name, values in each.items() if values and _equal(values)]
        self._first = {
            number: {name: _noted(v) for name, v in state[parameter].items() if name not in self._like_weights}
            for number, parameter in enumerate(held)
            if state.get(parameter)
        }

    @torch.no_grad()
    def put_back(self) -> None:
        """Resets all state to its first values, and copies to the weights."""
        for number, parameter in enumerate(held_by(self.optimizer)):
            if number not in self._first:
                self.optimizer.state.pop(parameter, None)
                continue
            state, first = self.optimizer.state[parameter], self._first[number]
            for name in [name for name in state if name not in (*first, *self._like_weights)]:
                del state[name]
            for name, value in first.items():
                if isinstance(value, Tensor) and isinstance(state.get(name), Tensor):
                    own_of(state[name]).copy_(value)  # in place, since the optimizer may hold it elsewhere, too
                else:
                    state[name] = copy.deepcopy(value)
        for name in self._like_weights:
            self._equal_weights(name)
        self._still = {name: still for name, still in self._still.items() if self._values(name)}

    def _equal_weights(self, name: str) -> None:
        """Gives state the values of the weights, unless it is known to stand still."""
        still = self._still.get(name)
        if still and still.settled:
            return
        for parameter, value in self._values(name).items():
            if still:
                still.originals.setdefault(parameter, value.clone())
            value.copy_(own_of(parameter.detach()))
            if still:
                still.seen[parameter] = sample([value])

    @torch.no_grad()
    def stepped(self) -> None:
        """Records an inner step."""
        if not self._looked:
            self.look()
        if all(still.settled for still in self._still.values()):
            self._weights = None
            return
        before, self._weights = self._weights, sample(held_by(self.optimizer))
        self._moves = self._moves + (1 if before is None else (before != self._weights).any())

    @torch.no_grad()
    def look(self) -> None:
        """Sees what has moved by itself, and what has not for a long time."""
        self._looked = True
        for name, values in self._undecided().items():
            still = self._still.get(name)
            if still is None:
                near = _near(values)
                if near:
                    self._still[name] = _Still(_samples(values), int(self._moves))
                elif near is not None:
                    self._others.append(name)
            elif _moved(still.seen, values):
                self._copies.append(name)
                del self._still[name]
            elif not still.settled and int(self._moves) - still.since >= PATIENCE_STEPS:
                for parameter, original in still.originals.items():
                    values[parameter].copy_(original)
                self._still[name] = _Still(_samples(values), still.since, settled=True)

    @torch.no_grad()
    def follow(self, before: Mapping[nn.Parameter, Tensor]) -> None:
        """Moves copies as far as the parameters have moved from `before`."""
        done = {own_of(parameter).data_ptr() for parameter in before}  # some state is the parameter itself
        for name in self.followers:
            values, still = self._values(name), self._still.get(name)
            for parameter, value in values.items():
                if parameter in before and value.data_ptr() not in done:
                    done.add(value.data_ptr())
                    if still:
                        still.originals.setdefault(parameter, value.clone())
                    value.add_(_like(parameter, value) - _like(before[parameter], value))
            if still:
                still.seen = _samples(values)
        if before and self._weights is not None:
            self._weights = sample(held_by(self.optimizer))

    def in_sight(self, parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
        """All that is or was a copy of these parameters; the parameters themselves where there is none."""
        found = [self._values(name) for name in (*self._copies, *self._still)]
        return [[values.get(parameter, parameter.detach()) for parameter in parameters] for values in found]

    def _values(self, name: str) -> Values:
        """A name's tensors, where they have their parameters' shapes."""
        state = self.optimizer.state
        found = {p: state[p][name] for p in held_by(self.optimizer) if name in state.get(p, {})}
        return {
            parameter: own_of(value)
            for parameter, value in found.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()
        }

    def _undecided(self) -> dict[str, Values]:
        names = {name: None for p in held_by(self.optimizer) for name in self.optimizer.state.get(p, {})}
        named = {name: self._values(name) for name in names if name not in (*self._copies, *self._others)}
        return {name: values for name, values in named.items() if values}

    def state_dict(self) -> dict[str, Any]:
        """What is known; parameters by their place in the optimizer."""
        place = {parameter: number for number, parameter in enumerate(held_by(self.optimizer))}
        still = {name: dict(vars(still)) for name, still in self._still.items()}
        for one in still.values():
            one |= {what: {place[p]: value for p, value in one[what].items()} for what in ("seen", "originals")}
        known = {"copies": list(self._copies), "others": list(self._others), "still": still}
        first = {"first": self._first, "like_weights": list(self._like_weights)}
        return {**known, **first, "looked": self._looked, "moves": int(self._moves)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        held = held_by(self.optimizer)
        self._copies, self._others = list(state["copies"]), list(state["others"])
        self._first, self._like_weights = state["first"], list(state["like_weights"])
        self._looked, self._moves = state["looked"], state["moves"]
        self._still = {}
        for name, still in state["still"].items():
            copied = {what: {held[n]: v.clone() for n, v in still[what].items()} for what in ("seen", "originals")}
            self._still[name] = _Still(**{**still, **copied})


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    return own_of(tensor.detach()).to(other.device, other.dtype)


def _samples(values: Values) -> Values:
    return {parameter: sample([value]) for parameter, value in values.items()}


def _moved(seen: Values, values: Values) -> bool:
    common = [parameter for parameter in values if parameter in seen]
    now = sample([values[parameter] for parameter in common])
    return not torch.equal(now, torch.cat([seen[parameter].to(now) for parameter in common]))


def _equal(values: Values) -> bool:
    return all(torch.equal(value, _like(parameter, value)) for parameter, value in values.items())


def _near(values: Values) -> bool | None:
    """Whether values are near the weights; None where the weights are not finite, or all zero."""
    distance = square = 0.0
    for parameter, value in values.items():
        weights = own_of(parameter.detach()).float()
        distance += float((value.to(weights) - weights).square().sum())
        square += float(weights.square().sum())
    return distance < NEAR * square if math.isfinite(distance + square) and distance + square else None


def _noted(value: Any) -> Any:
    """A copy for later; a tensor of one value takes no memory."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    own = own_of(value.detach())
    if own.numel() and bool((own == own.reshape(-1)[0]).all()):
        return own.reshape(-1)[0].clone().expand(own.shape)
    return own.to("cpu", copy=True)
