"""What a model has besides what is trained: buffers, such as BatchNorm's statistics, and frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import UserError
from farflung.hooks.buffers import real_view, sound
from farflung.hooks.digests import digest
from farflung.hooks.shards import whole_of
from farflung.hooks.start import Fact
from farflung.hooks.trained import Trained, refuse_without_values
from farflung.hooks.unshared import Unshared


class Untrained:
    """A model's persistent buffers, those in its `state_dict`, and the parameters that nobody trains.

    A loop may move frozen parameters itself, as a teacher that follows its student. Those that have been seen to move
    are kept and restored like buffers. `undo` takes what undoes the hooks.

    Raises UserError: a tensor has no values yet, or is of a kind that cannot be compared.
    """

    def __init__(self, model: nn.Module, trained: Trained, undo: ExitStack) -> None:
        self._model = model
        self._trained = trained
        self._kept: dict[str, Tensor] = {}
        self._moving: list[str] = []
        self._resumes = False
        refuse_without_values(self.buffers())
        _refuse_odd(self.named())
        self._noted = {name: _told(tensor) for name, tensor in self._compared().items()}
        self.keep()
        for prefix, module in model.named_modules():
            scripted = isinstance(module, torch.jit.ScriptModule)  # takes no such hooks
            if (module._buffers or module._parameters) and not scripted:
                hook = Unshared(partial(self._module_loaded, prefix))
                undo.callback(module.register_load_state_dict_post_hook(hook).remove)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now, by name; a module may have put another tensor in a buffer's place."""
        passing = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        return {name: buffer for name, buffer in self._model.named_buffers() if name not in passing}

    def frozen(self) -> dict[str, Tensor]:
        """The parameters that nobody trains, by name."""
        averaged = self._trained.averaged()
        named = self._trained.present()
        return {name: p for name, p in named.items() if not p.requires_grad and p not in averaged}

    def named(self) -> dict[str, Tensor]:
        """Both, by name."""
        return self.buffers() | self.frozen()

    def _compared(self) -> dict[str, Tensor]:
        """What must be equal at the start: these, and parameters that others train."""
        return self.named() | dict(self._trained.others())

    @torch.no_grad()
    def told_of_whole(self) -> dict[str, str]:
        """What tells frozen parameters from others, in whatever layout; all that have shards of one call this alike."""
        buffers = self.buffers()
        return {name: _told(whole_of(tensor)) for name, tensor in self._compared().items() if name not in buffers}

    def floating(self) -> list[str]:
        """The names of the buffers that training may change by less than one."""
        return [name for name, buffer in self.buffers().items() if buffer.is_floating_point()]

    @torch.no_grad()
    def begin(self) -> list[Fact]:
        """Records what training starts from; returns the part that must be equal on all replicas.

        The first batch changes buffers before the first step, on each replica differently; then their values before it
        must be equal. Frozen weights must then have changed on all replicas.
        """
        # What a state has kept is older than what was loaded with it; one from another layout has kept other things.
        known = set(self._kept) if self._resumes else set()
        self._resumes = False
        self._keep_all({name: tensor for name, tensor in self._moved().items() if name not in known})
        frozen = self.frozen()
        facts = []
        for name, tensor in self._compared().items():
            now = _told(tensor)
            before = self._noted.get(name, now)
            moved = f", {now != before}" if name in frozen else ""
            facts.append(Fact(f"values of {name}", (now, before + moved)))
            self._noted[name] = now
        return facts

    @torch.no_grad()
    def look(self) -> list[str]:
        """Finds frozen weights that change; the names of all that have."""
        for name, tensor in self.frozen().items():
            if name in self._moving:
                continue
            now = _told(tensor)
            if now != self._noted.setdefault(name, now):
                self._moving.append(name)
                self._keep(name, tensor)
        return self._moving

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps a copy of all that changes, for `restore`."""
        self._keep_all(self._moved())

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the copy."""
        for name, tensor in self._moved().items():
            view, kept = real_view(tensor), self._kept.get(name)
            if kept is not None and kept.shape == view.shape:
                view.copy_(kept)

    @torch.no_grad()
    def _module_loaded(self, prefix: str, module: nn.Module, *_: Any) -> None:
        """Records what a module itself, without its children, has just loaded."""
        for name, tensor in (*module._buffers.items(), *module._parameters.items()):
            whole = f"{prefix}.{name}".lstrip(".")
            if tensor is not None and whole in self._noted:
                self._noted[whole] = _told(tensor)
                if not self._resumes and (name in module._buffers or whole in self._moving):
                    self._keep(whole, tensor)

    def state_dict(self) -> dict[str, Any]:
        """The copy, and the names of frozen weights that have changed."""
        return {"kept": dict(self._kept), "moving": list(self._moving)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`, whether the model's own is loaded before or after."""
        self._moving = list(state["moving"])
        self._kept = {name: kept.clone() for name, kept in state["kept"].items()}
        self._resumes = True

    def _moved(self) -> dict[str, Tensor]:
        frozen = self.frozen() if self._moving else {}
        return self.buffers() | {name: frozen[name] for name in self._moving if name in frozen}

    def _keep_all(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._keep(name, tensor)

    def _keep(self, name: str, tensor: Tensor) -> None:
        view = real_view(tensor)
        if sound(view):
            self._kept[name] = view.clone()


def _refuse_odd(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = str(tensor.dtype if tensor.is_quantized else tensor.layout).removeprefix("torch.")
            raise UserError(
                f"{name} is {kind}, which replicas cannot compare or average; "
                "register it as a buffer with persistent=False"
            )


def _told(tensor: Tensor) -> str:
    return str(digest([real_view(tensor)]).tolist())
