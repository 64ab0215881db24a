"""GradScaler's steps: gradients are unscaled before anything else, and no step is left out.

A GradScaler calls `step()` of most optimizers only where no gradient overflowed. Replicas would then count different
steps. If an optimizer says that it handles scaling, the scaler always calls its `step()`, and sets `grad_scale` and
`found_inf`. Each replica's scaler keeps a scale of its own; they need not be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from farflung.errors import UserError
from farflung.hooks.steps import hook_steps
from farflung.hooks.trained import held_by

_BEARS_SCALING = "_step_supports_amp_scaling"


@dataclass
class _Asked:
    """What an optimizer said of itself, and how many sessions have made it say that it handles scaling."""

    own: bool | None
    by: int = 0


_ASKED: WeakKeyDictionary[torch.optim.Optimizer, _Asked] = WeakKeyDictionary()


def step_always(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Makes GradScalers call `step()` of this optimizer after an overflow, too; returns what undoes that.

    The caller must then call `unscale` before each step, or the optimizer would see scaled gradients.
    """
    asked = _ASKED.setdefault(optimizer, _Asked(vars(optimizer).get(_BEARS_SCALING)))
    asked.by += 1
    setattr(optimizer, _BEARS_SCALING, True)

    def undo() -> None:
        asked.by -= 1
        if asked.by:
            return
        del _ASKED[optimizer]
        if asked.own is None:
            delattr(optimizer, _BEARS_SCALING)
        else:
            setattr(optimizer, _BEARS_SCALING, asked.own)

    return undo


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler is calling the present step."""
    return getattr(optimizer, "found_inf", None) is not None


@torch.no_grad()
def unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Divides the gradients by the scale, unless the user has; whether one of them overflowed.

    The optimizer then has nothing to unscale or skip. Raises UserError for float16 ones.
    """
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", 0)
    if scale is not None:
        inverse = 1 / float(scale)
        for parameter in held_by(optimizer):
            if parameter.grad is None:
                continue
            if parameter.grad.dtype == torch.float16:
                raise UserError("a GradScaler is for float32 weights under autocast; gradients in float16 would vanish")
            parameter.grad.mul_(inverse)
    if is_scaled(optimizer):
        optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    return bool(found)


def take_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Removes the gradients, so that the step changes nothing."""
    for parameter in held_by(optimizer):
        parameter.grad = None


def unscaled_steps(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Makes each step of a GradScaler a call of `step()`: without gradients after an overflow. Returns what undoes it.

    An optimizer that unscales by itself is called always as it is.
    """
    if optimizer not in _ASKED and getattr(optimizer, _BEARS_SCALING, False):
        return lambda: None
    undo = step_always(optimizer)

    def before_step(*_: Any) -> None:
        if unscale(optimizer):
            take_gradients(optimizer)

    unhook = hook_steps(optimizer, before=before_step)

    def remove() -> None:
        unhook()
        undo()

    return remove
