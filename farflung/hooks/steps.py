"""Hooks on an optimizer's steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], Arguments | None]


def hook_steps(
    optimizer: torch.optim.Optimizer, before: Before | None = None, after: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Calls `before` and `after` once for each step; returns what undoes that.

    Torch calls hooks for each class whose `step()` runs, so twice where one calls `super().step()`. Only the outermost
    call counts. It is found by frames on the stack, since a flag would stay set after a step that raised. A compiled
    step continues in other frames after each hook, but those are called from the first. `before` is as
    `register_step_pre_hook` wants it: given the step's arguments, it may return others.
    """
    under_way: list[FrameType] = []

    def drop_ended() -> FrameType:
        """Forgets calls that have ended without an after-hook; returns the hook's caller."""
        stack = [frame for frame in _stack(sys._getframe(2)) if not _of_compiler(frame)]
        under_way[:] = [frame for frame in under_way if frame in stack]
        return stack[0]

    def pre_hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        under_way.append(drop_ended())
        return before(optimizer, args, kwargs) if before and len(under_way) == 1 else None

    def post_hook(*_: Any) -> None:
        drop_ended()
        under_way.pop()
        if after and not under_way:
            after()

    # Exchanges are nothing that a compiled step could have in it.
    untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
    hooks = (
        optimizer.register_step_pre_hook(untraced(pre_hook)),
        optimizer.register_step_post_hook(untraced(post_hook)),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_compiler(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torch._dynamo")
