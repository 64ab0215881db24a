"""AdamW with a second, slow momentum, which remembers from one round to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farflung.hooks.shards import own_of

SLOW = "slow_momentum"
"""What the slow momentum is called in an optimizer's state."""


class SlowAdamW(torch.optim.Optimizer):
    """AdamW along a mix of two momenta (MT-DAO, arXiv 2510.05361), of gradients g.

        m ← β₁·m + (1 - β₁)·g;   s ← βₛ·s + (1 - βₛ)·g;   v ← β₂·v + (1 - β₂)·g²
        θ ← (1 - lr·decay)·θ - lr·((1 - ω)·m̂ + ω·ŝ) / (√v̂ + ε)

    ω is slow_share, βₛ slow_momentum; a hat divides by 1 - βᵗ after t steps, as ever. What replicas have in common is
    forgotten by m between two rounds; s remembers it, and is averaged between them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        slow_share: float = 0.5,
        slow_momentum: float = 0.999,
    ) -> None:
        chosen = {"betas": betas, "eps": eps, "slow_share": slow_share, "slow_momentum": slow_momentum}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **chosen})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(group, parameter, own_of(parameter.grad))
        return loss

    def _move(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", SLOW, "exp_avg_sq")})
        state["step"] += 1
        step = int(state["step"])
        fast, slow, square = (own_of(state[name]) for name in ("exp_avg", SLOW, "exp_avg_sq"))
        theta, (of_fast, of_square) = own_of(parameter), group["betas"]
        fast.lerp_(gradient, 1 - of_fast)
        square.mul_(of_square).addcmul_(gradient, gradient, value=1 - of_square)
        slow.lerp_(gradient, 1 - group["slow_momentum"])
        along = mixed(fast, of_fast, slow, group, step)
        size = square.div(1 - of_square**step).sqrt_().add_(group["eps"])
        theta.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(along, size, value=-group["lr"])


def mixed(fast: torch.Tensor, of_fast: float, slow: torch.Tensor, group: dict[str, Any], step: int) -> torch.Tensor:
    """(1 - ω)·fast / (1 - βᵗ) + ω·slow / (1 - βₛᵗ), with the settings of a group, after so many steps."""
    return torch.lerp(fast / (1 - of_fast**step), slow / (1 - group["slow_momentum"] ** step), group["slow_share"])
