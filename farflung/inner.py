"""Inner optimizers: what one replica's ordinary steps are made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from farflung.errors import UserError


@dataclass(frozen=True)
class Inner:
    """An inner optimizer: what makes it of named parameters, `lr` and `weight_decay`, and its usual learning rate."""

    make: Callable[..., torch.optim.Optimizer]
    lr: float


ADAMW = Inner(partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True), lr=3e-3)


class SignSGD(torch.optim.Optimizer):
    """DeMo's (arXiv 2411.19870), which keeps nothing: θ ← θ - lr · (sign(gradient) + weight decay · θ)."""

    def __init__(self, parameters: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a model's layers, AdamW for all else: embeddings, head, norms, biases.

    Muon's steps are scaled to be as large as AdamW's (arXiv 2502.16982), so one learning rate serves both. A matrix is
    a layer's where its name has a number in it, as those in an `nn.ModuleList` have. Matrices must be whole: Muon of a
    shard is another step than the matrix's.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        super().__init__(named, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds named parameters, as one group for Muon and one for AdamW. Raises UserError where names are missing."""
        named = list(param_group["params"])
        if not all(isinstance(entry, tuple) for entry in named):
            raise UserError("MuonAdamW tells a layer's matrices by their names; give it model.named_parameters()")
        settings = {**self.defaults, **{key: value for key, value in param_group.items() if key != "params"}}
        muon: Callable[..., torch.optim.Optimizer] = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
        for kind, of_layers in ((muon, True), (ADAMW.make, False)):
            if chosen := [(name, p) for name, p in named if _is_matrix_of_layer(name, p) is of_layers]:
                part = kind(chosen, **settings)
                super().add_param_group(part.param_groups[0])
                self._parts.append(part)
        self._share()

    def _share(self) -> None:
        """Lets the parts work on this optimizer's groups and state, so that these are the only ones."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies and pickles; `load_state_dict` calls it, too."""
        super().__setstate__(state)
        self._share()

    def step(self, closure: Any = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        loss = _loss_of(closure)
        for part in self._parts:
            part.step()
        return loss


def _is_matrix_of_layer(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split("."))


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    with torch.enable_grad():
        return None if closure is None else closure()


MUON = Inner(MuonAdamW, lr=1e-2)
SIGN = Inner(SignSGD, lr=1e-2)

INNER = {"adamw": ADAMW, "muon": MUON, "sign": SIGN}
"""Inner optimizers by the names that settings give them."""


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names, in the order in which the optimizer numbers them."""
    return [name for group in optimizer.param_groups for name in group["param_names"]]
