"""Inner optimizers: what one replica's ordinary steps are made with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Inner:
    """An inner optimizer.

    Args:
        make: takes named parameters, `lr` and `weight_decay`.
        lr: the learning rate where nobody says another.
    """

    make: Callable[..., torch.optim.Optimizer]
    lr: float


ADAMW = Inner(partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True), lr=3e-3)


class SignSGD(torch.optim.Optimizer):
    """θ ← θ - lr · (sign(gradient) + weight decay · θ): an inner optimizer that keeps nothing.

    DeMo's (arXiv 2411.19870).
    """

    def __init__(self, parameters: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; parameters without a gradient stay."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of a model's layers, AdamW for all else: embeddings, head, norms, biases.

    Muon's steps are scaled to be as large as AdamW's (arXiv 2502.16982), so one learning rate serves both. A matrix is
    a layer's where its name has a number in it, as those in an `nn.ModuleList` have.

    Args:
        named: parameters by name. Matrices must be whole: Muon of a shard is another step than the matrix's.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        named = list(named)
        of_layers = {name for name, p in named if p.ndim == 2 and any(part.isdigit() for part in name.split("."))}
        muon: Callable[..., torch.optim.Optimizer] = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
        kinds = ((muon, True), (ADAMW.make, False))
        chosen = [(kind, [(name, p) for name, p in named if (name in of_layers) is hidden]) for kind, hidden in kinds]
        self._parts = [kind(parameters, lr=lr, weight_decay=weight_decay) for kind, parameters in chosen if parameters]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Lets the parts work on this optimizer's groups and state, so that these are the only ones."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; parameters without a gradient stay."""
        for part in self._parts:
            part.step()


MUON = Inner(MuonAdamW, lr=1e-2)
SIGN = Inner(SignSGD, lr=1e-2)

INNER = {"adamw": ADAMW, "muon": MUON, "sign": SIGN}
"""Inner optimizers by the names that settings give them."""


def names_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names, in the order in which the optimizer numbers them."""
    return [name for group in optimizer.param_groups for name in group["param_names"]]
