"""AdamW whose gradients are taken between fast weights and their average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farflung.hooks.shards import own_of

FAST, SLOW = "fast weights", "averaged weights"
"""What z and x are called in the optimizer's state."""


class PrimalAveraging(torch.optim.Optimizer):
    """Generalised primal averaging (GPA, arXiv 2512.17131) with AdamW's direction d; the parameters are y.

        y = μy·x + (1 - μy)·z;   z ← (1 - lr·decay)·z - lr·d(gradient at y);   x ← μx·x + (1 - μx)·z

    That is a lookahead in every step, in place of DiLoCo's in every round. x and z are kept as they are. The two
    numbers are ours; with both 0 it is AdamW.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        average: float = 0.95,
        between: float = 0.8,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        chosen = {"average": average, "between": between, "betas": betas, "eps": eps}
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
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state.update({name: parameter.detach().clone() for name in (FAST, SLOW)})
            state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")})
        state["step"] += 1
        step = int(state["step"])
        z, x, mean, square = (own_of(state[name]) for name in (FAST, SLOW, "exp_avg", "exp_avg_sq"))
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        size = square.div(1 - second**step).sqrt_().add_(group["eps"])
        z.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, size, value=-group["lr"] / (1 - first**step))
        x.lerp_(z, 1 - group["average"])
        own_of(parameter).copy_(torch.lerp(z, x, group["between"]))
