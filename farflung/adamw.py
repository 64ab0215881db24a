"""AdamW with what torch's has not: a slow momentum beside its own, or weights that look ahead to their average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from farflung.errors import UserError
from farflung.hooks.shards import own_of
from farflung.tables import Rule

SLOW = "slow_momentum"
"""What the slow momentum is called in an optimizer's state."""
FAST, AVERAGED = "fast weights", "averaged weights"
"""What z and x of PrimalAveraging are called there."""


_SHARE, _MOMENTUM = Rule(least=0, most=1), Rule(least=0, below=1)
_RULES = {
    **dict.fromkeys(("lr", "weight_decay", "eps"), Rule(least=0)),
    **dict.fromkeys(("slow_share", "align", "average", "between"), _SHARE),
    **dict.fromkeys(("momentum", "slow_momentum", "betas"), _MOMENTUM),
}
"""Of the settings of inner optimizers, by name."""


def checked(settings: dict[str, Any]) -> dict[str, Any]:
    """An inner optimizer's settings. Raises UserError for one out of its limits."""
    for name in settings.keys() & _RULES.keys():
        given = settings[name]
        for value in given if isinstance(given, tuple) else (given,):
            _RULES[name].check(name, value)
    return settings


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What an optimizer's closure, if there is one, returns."""
    with torch.enable_grad():
        return None if closure is None else closure()


def refuse_sparse(optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    """Raises UserError for a gradient that is not dense."""
    if gradient.layout != torch.strided:
        raise UserError(
            f"{type(optimizer).__name__} takes no sparse gradients; make the embedding with sparse=False, or give it "
            "to torch.optim.SparseAdam, and attach both optimizers"
        )


@torch.no_grad()
def step_each(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None,
    move: Callable[[dict[str, Any], Tensor, Tensor], None],
) -> Any:
    """One step: `move` is given each parameter that has a gradient, its group, and this process's own of the gradient.

    Returns what the closure, if there is one, returns.
    """
    loss = loss_of(closure)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                move(group, parameter, own_of(parameter.grad))
    return loss


class SlowAdamW(torch.optim.Optimizer):
    """AdamW along a mix of two momenta (MT-DAO, arXiv 2510.05361), of gradients g.

        m ← β₁·m + (1 - β₁)·g;   s ← βₛ·s + (1 - βₛ)·g;   v ← β₂·v + (1 - β₂)·g²
        θ ← (1 - lr·decay)·θ - lr·((1 - ω)·m̂ + ω·ŝ) / (√v̂ + ε)

    ω is slow_share, βₛ slow_momentum; a hat divides by 1 - βᵗ after t steps, as ever. What replicas have in common is
    forgotten by m between two rounds; s remembers it, and is averaged between them, and v with it. Choose β₂ ≥ βₛ: a
    weight that gets no gradients for long, as that of a rare token, else goes along s / √v with a v that is forgotten.
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
        super().__init__(params, checked({"lr": lr, "weight_decay": weight_decay, **chosen}))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        return step_each(self, closure, self._move)

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        refuse_sparse(self, gradient)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", SLOW, "exp_avg_sq")})
        fast, slow, square = (own_of(state[name]) for name in ("exp_avg", SLOW, "exp_avg_sq"))
        step, first = _counted(state), group["betas"][0]
        fast.lerp_(gradient, 1 - first)
        slow.lerp_(gradient, 1 - group["slow_momentum"])
        along = mixed(fast, first, slow, group, step)
        size = _size(square, gradient, group, step)
        own_of(parameter).mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(along, size, value=-group["lr"])


def mixed(fast: Tensor, of_fast: float, slow: Tensor, group: dict[str, Any], step: float) -> Tensor:
    """(1 - ω)·fast / (1 - βᵗ) + ω·slow / (1 - βₛᵗ), with the settings of a group, after so many steps."""
    return torch.lerp(fast / (1 - of_fast**step), slow / (1 - group["slow_momentum"] ** step), group["slow_share"])


class PrimalAveraging(torch.optim.Optimizer):
    """Generalised primal averaging (GPA, arXiv 2512.17131) with AdamW's direction d; the parameters are y.

        y = μy·x + (1 - μy)·z;   z ← (1 - lr·decay)·z - lr·d(gradient at y);   x ← μx·x + (1 - μx)·z

    That is a lookahead in every step, in place of DiLoCo's in every round, and the momentum: x remembers. A mean of
    gradients before it (β₁ > 0) is a second one; where both remember 10 to 20 steps, weights swing. The numbers are
    ours: short, for rounds a few steps apart. Its authors have μx = 0.9967, μy = 0.7 and β₁ = 0.9, of which x remembers
    300 steps. With both averages 0 it is AdamW.
    """

    keeps_weights = FAST, AVERAGED
    """What is kept of weights, and must move with them where others do: they are made anew from it in each step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        average: float = 0.95,
        between: float = 0.8,
        betas: tuple[float, float] = (0.0, 0.95),
        eps: float = 1e-8,
    ) -> None:
        chosen = {"average": average, "between": between, "betas": betas, "eps": eps}
        super().__init__(params, checked({"lr": lr, "weight_decay": weight_decay, **chosen}))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay. Returns what the closure, if there is one, returns."""
        return step_each(self, closure, self._move)

    def _move(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        refuse_sparse(self, gradient)
        state, first = self.state[parameter], group["betas"][0]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state.update({name: parameter.detach().clone() for name in (FAST, AVERAGED)})
            state.update({name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")})
        z, x, mean, square = (own_of(state[name]) for name in (FAST, AVERAGED, "exp_avg", "exp_avg_sq"))
        step = _counted(state)
        mean.lerp_(gradient, 1 - first)
        size = _size(square, gradient, group, step)
        z.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, size, value=-group["lr"] / (1 - first**step))
        x.lerp_(z, 1 - group["average"])
        own_of(parameter).copy_(torch.lerp(z, x, group["between"]))


def _counted(state: dict[str, Any]) -> float:
    """The number of this step; between two where it is a mean of several replicas'."""
    state["step"] += 1
    return float(state["step"])


def _size(square: Tensor, gradient: Tensor, group: dict[str, Any], step: float) -> Tensor:
    """√v̂ + ε, once the mean of squares has the gradient's."""
    second = group["betas"][1]
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    return square.div(1 - second**step).sqrt_().add_(group["eps"])
