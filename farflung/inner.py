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


class _EachByItself(torch.optim.Optimizer):
    """Steps that decay each parameter and then move it along its own gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        loss = _loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class SignSGD(_EachByItself):
    """DeMo's (arXiv 2411.19870), which keeps nothing: θ ← θ - lr · (sign(gradient) + weight decay · θ)."""

    def __init__(self, parameters: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        parameter.add_(gradient.sign(), alpha=-group["lr"])


class Muon(_EachByItself):
    """For matrices: steps along the orthogonal factor of the gradients' mean, with Nesterov's momentum.

    It differs from `torch.optim.Muon` on processors only: most of them have no bfloat16 and are ten times as slow with
    it. Steps are as large as AdamW's (arXiv 2502.16982), so one learning rate serves both.
    """

    def __init__(self, matrices: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = _orthogonal(gradient.lerp(mean, group["momentum"]))
        parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About U Vᵀ of a matrix U S Vᵀ: five steps of Newton and Schulz, with the coefficients that Muon is known for."""
    own, of_gram, of_square = 3.4445, -4.7750, 2.0315
    dtype = torch.float32 if matrix.device.type == "cpu" else torch.bfloat16
    tall = matrix.shape[0] > matrix.shape[1]
    near = (matrix.T if tall else matrix).to(dtype)
    near = near / near.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = near @ near.T
        near = torch.addmm(near, torch.addmm(gram, gram, gram, beta=of_gram, alpha=of_square), near, beta=own)
    return near.T if tall else near


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a model's layers, AdamW for all else: embeddings, head, norms, biases.

    A matrix is a layer's where its name has a number in it, as those in an `nn.ModuleList` have. Matrices must be
    whole: Muon of a shard is another step than the matrix's.
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
        kinds: tuple[tuple[Callable[..., torch.optim.Optimizer], bool], ...] = ((Muon, True), (ADAMW.make, False))
        for kind, of_layers in kinds:
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
