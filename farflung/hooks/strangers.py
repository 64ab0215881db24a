"""Optimizers that step attached weights without being attached: their steps hold no rounds."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from farflung.errors import UserError
from farflung.hooks.trained import Trained, attached, held_by

STRANGER = (
    "{stranger} has stepped weights that are attached with another optimizer, and its steps hold no rounds; leave the "
    "with statement and attach with the new optimizer, on all replicas"
)

_CHANGES = Lock()
_hooked = False
_before: WeakKeyDictionary[Optimizer, dict[int, int]] = WeakKeyDictionary()
"""Of strangers under way: how many attached steps each session had seen when they began, by the session's identity."""


def watch_for_strangers() -> None:
    """Hooks all optimizers of the process, once and for good: torch keeps such hooks in a list that threads share."""
    global _hooked
    with _CHANGES:
        if not _hooked:
            _hooked = True
            register_optimizer_step_pre_hook(torch.compiler.disable(_begins))
            register_optimizer_step_post_hook(torch.compiler.disable(_ends))


def _begins(optimizer: Optimizer, *_: Any) -> None:
    own, others = _sessions(optimizer)
    for trained in own:
        trained.stepping = True
    if others:
        _before[optimizer] = {id(trained): trained.steps for trained in others}


def _ends(optimizer: Optimizer, *_: Any) -> None:
    """An optimizer that wraps an attached one, or that an attached one wraps, is no stranger."""
    own, others = _sessions(optimizer)
    for trained in own:
        trained.stepping = False
        trained.steps += 1
    seen = _before.pop(optimizer, {})
    if any(not trained.stepping and seen.get(id(trained)) == trained.steps for trained in others):
        raise UserError(STRANGER.format(stranger=type(optimizer).__name__))


def _sessions(optimizer: Optimizer) -> tuple[list[Trained], list[Trained]]:
    """The sessions that an optimizer is attached to; of one that is attached to none, those whose weights it holds."""
    sessions = attached()
    if own := [trained for trained in sessions if any(optimizer is one for one in trained.optimizers)]:
        return own, []
    held = held_by(optimizer) if sessions else []
    return [], [trained for trained in sessions if not trained.apart_from(held)]
