"""Hooks on an optimizer's steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None]


def hook_steps(
    optimizer: torch.optim.Optimizer, before: Before | None = None, after: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Calls `before` and `after` once for each step; returns what undoes that.

    Torch calls hooks for each class whose `step()` takes part, so twice where one calls `super().step()`. Only the
    outermost call counts: that whose frame is on the stack. A flag would be left standing by a step that raised.

    Args:
        before: as `register_step_pre_hook` wants it: given the step's arguments, it may return others.
        after: called when the step has been made.
    """
    under_way: FrameType | None = None

    def pre_hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        nonlocal under_way
        caller: FrameType | None = sys._getframe(1)
        frame = caller
        while frame is not None and under_way is not None:
            if frame is under_way:
                return None
            frame = frame.f_back
        under_way = caller
        return before(optimizer, args, kwargs) if before else None

    def post_hook(*_: Any) -> None:
        nonlocal under_way
        if sys._getframe(1) is under_way:
            under_way = None
            if after:
                after()

    hooks = optimizer.register_step_pre_hook(pre_hook), optimizer.register_step_post_hook(post_hook)

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo
