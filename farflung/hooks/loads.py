"""Weights that a loop loads while it trains: rounds would take the difference for progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.hooks.digests import digest
from farflung.hooks.shards import own_of
from farflung.hooks.trained import Trained
from farflung.hooks.unshared import Unshared

LOADED = (
    "{name} was changed by load_state_dict after step {step}, and replicas would take the difference for progress; to "
    "go back to a checkpoint, load model, optimizer and outer.load_state_dict before the next step; to start from "
    "other weights, leave the with statement and attach again, on all replicas"
)

LATE_LOAD = (
    "weights were loaded while a round was under way, which now changes them; call apply_pending() before loading"
)


class Loads:
    """Notices `load_state_dict` of a model, or a part of it, once training has begun.

    Weights that are back at their old values before the next step, as after an evaluation of others, do not count. A
    digest is made when something is loaded, and only then. `undo` takes what undoes the hooks.
    """

    def __init__(self, model: nn.Module, trained: Trained, undo: ExitStack, watches: Callable[[], bool]) -> None:
        self._names = {parameter: name for name, parameter in trained.named.items()}
        self._trained = trained
        self._before: dict[nn.Parameter, Tensor] = {}
        self._watches = watches
        for module in model.modules():
            own = [parameter for parameter in module._parameters.values() if parameter in self._names]
            if own and not isinstance(module, torch.jit.ScriptModule):  # which takes no such hooks
                hook = Unshared(partial(self._note, own))
                undo.callback(module.register_load_state_dict_pre_hook(hook).remove)

    def check(self, step: int) -> None:
        """Raises UserError where weights have been loaded since the last step, and differ."""
        if not self._before:
            return
        self._trained.check_present()
        if name := self.changed():
            raise UserError(LOADED.format(name=name, step=step))
        self.forget()

    def changed(self) -> str:
        """The name of a parameter that has been loaded with other values since the last step; "" for none."""
        for parameter, before in self._before.items():
            if not torch.equal(_digest(parameter), before):
                return self._names[parameter]
        return ""

    def forget(self) -> None:
        """Takes the weights as they are now for those that training has made."""
        self._before.clear()

    def _note(self, parameters: list[nn.Parameter], *_: Any) -> None:
        if self._watches():
            for parameter in parameters:
                if parameter not in self._before:
                    self._before[parameter] = _digest(parameter)


@torch.no_grad()
def _digest(parameter: nn.Parameter) -> Tensor:
    return digest([own_of(parameter)])
