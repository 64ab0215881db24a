"""What a plan says of each layer, and the profile that it is made from: values, kept as JSON in the run folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from farflung.errors import UserError
from farflung.tables import from_table

Mode = Literal["keep", "recompute", "move", "recompute-moved"]
"""What becomes of a layer's saved tensors: all stay; only its input stays; all go out and come back; its input does."""

State = Literal["near", "moments-far", "optimizer-far", "weights-far"]
"""Where a layer's state is: on the device; moments on the host, the step near; moments and step there; weights too."""

T = TypeVar("T")


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer's saved tensors, and where its state is."""

    mode: Mode = "keep"
    state: State = "near"


@dataclass(frozen=True)
class Plan:
    """What to do with each layer, and what that is predicted to take.

    Args:
        layers: in the order of the model.
        prefetch_bytes: how much of what is moved may be near beyond what stays: in all, saved tensors, and weights and
            moments that come and go, never take more than what kept layers save, plus this. See `simulate`.
        peak_bytes: the most of the device's memory at any time.
        seconds: of a step, or of one of its passes: see Profile.
    """

    layers: tuple[LayerPlan, ...]
    prefetch_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class LayerCost:
    """What a layer takes in one forward and backward pass, and when the optimizer steps it.

    Args:
        forward_s, backward_s: computing, without computing anything again.
        saved_bytes: what its forward saves for its backward, its input included, weights not; each storage once.
        input_bytes: its input alone, from which it can be computed again.
        weight_bytes, gradient_bytes, moment_bytes: of its parameters.
        near_step_s, far_step_s: the optimizer's step of its parameters on the device, and on the host.
        step_bytes: what that step holds meanwhile, beside what the device holds at all times.
        spared_s: what of the forward pass is spared when it is computed again, which ends as soon as the backward pass
            has what it needs.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    input_bytes: int
    weight_bytes: int
    gradient_bytes: int
    moment_bytes: int
    near_step_s: float
    far_step_s: float
    step_bytes: int = 0
    spared_s: float = 0.0

    @property
    def again_s(self) -> float:
        """Computing the forward pass again."""
        return self.forward_s - self.spared_s


NOTHING = LayerCost(0.0, 0.0, 0, 0, 0, 0, 0, 0.0, 0.0)
"""What a part takes that is not there, such as before a last stage's layers."""


@dataclass(frozen=True)
class Profile:
    """What a plan is made from.

    Args:
        layers: in the order of the model.
        before, head: what comes before the layers and after them; they are kept, and their state is near.
        out_bytes_s, in_bytes_s: copies to the far tier and back, both ways at once, bytes a second.
        fixed_bytes: what is on the device at all times besides: working memory, buffers, the outer optimizer's state.
        beside: whether the host updates layers whose optimizer is far beside the computing of this step and the next;
            else it does so between them, and what it updates a layer with is near meanwhile.
        in_flight: forward passes that wait for their backward passes, at most.
        passes: forward and backward passes in a step. Plans are of one of them, and of that part of the optimizer's
            step; where there are several, gradients of passes before are there from the beginning of one.
        casts_again: whether autocast casts a weight more than once in a pass, so that all uses share one copy.
    """

    layers: tuple[LayerCost, ...]
    before: LayerCost
    head: LayerCost
    out_bytes_s: float
    in_bytes_s: float
    fixed_bytes: int
    beside: bool = True
    in_flight: int = 1
    passes: int = 1
    casts_again: bool = False

    @cached_property
    def chain(self) -> tuple[LayerCost, ...]:
        """All in the order of the forward pass: what comes before the layers, these, the head."""
        return (self.before, *self.layers, self.head)


def worst(profiles: Sequence[Profile]) -> Profile:
    """What is enough for each of some processes that compute the same layers: the most of any, and the slowest copies.

    What it says of each is the same in all of them, so that they find the same plan.
    """

    def most(costs: Iterable[LayerCost]) -> LayerCost:
        costs = list(costs)
        slowest = LayerCost(*map(max, zip(*map(dataclasses.astuple, costs), strict=True)))
        again_s = max(cost.again_s for cost in costs)
        return dataclasses.replace(slowest, spared_s=slowest.forward_s - again_s)

    return dataclasses.replace(
        profiles[0],
        layers=tuple(map(most, zip(*(profile.layers for profile in profiles), strict=True))),
        before=most(profile.before for profile in profiles),
        head=most(profile.head for profile in profiles),
        out_bytes_s=min(profile.out_bytes_s for profile in profiles),
        in_bytes_s=min(profile.in_bytes_s for profile in profiles),
        fixed_bytes=max(profile.fixed_bytes for profile in profiles),
    )


def to_json(value: Plan | Profile) -> str:
    """The text that `from_json` reads."""
    return json.dumps(dataclasses.asdict(value))


def from_json(kind: type[T], text: str, where: str) -> T:
    """A plan or profile of its text; `where` is for messages. Raises UserError."""
    try:
        table: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is no JSON: {error}; remove it, and a new plan is made") from error
    if not isinstance(table, dict):
        raise UserError(f"{where}: it must be a table; remove it, and a new plan is made")
    return from_table(kind, table, where)
