"""The loss by which a mixture's routers learn to use all experts alike, where the layers lie in several stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.errors import UserError


@dataclass(frozen=True)
class RouterLoss:
    """The load-balancing loss of Switch Transformers (arXiv 2101.03961), as transformers has it, of one microbatch:

        coefficient · E · Σ_e f_e · P_e

    f_e is the share of tokens that expert e gets, P_e its mean probability, over the tokens of all layers together. The
    loss is no sum over layers, but f and P are made of sums: stages hand these on with the microbatch, the last stage
    makes the loss, and the gradient of the sums comes back the same way.

    Args:
        experts: E.
        chosen: experts that a token goes to.
        coefficient: the weight of the loss beside the cross-entropy.
    """

    experts: int
    chosen: int
    coefficient: float

    @property
    def numbers(self) -> int:
        """How many sums there are."""
        return 2 * self.experts + 1

    def sums(self, logits: Sequence[Tensor]) -> Tensor:
        """Sums over some layers' router logits (tokens, E): each expert's tokens, its probabilities, and all tokens."""
        total = torch.zeros(self.numbers)
        for layer in logits:
            probabilities = torch.softmax(layer, dim=-1).float()
            best = torch.topk(probabilities, self.chosen, dim=-1).indices
            sent = torch.zeros_like(probabilities).scatter_(1, best, 1.0)
            tokens = probabilities.new_full((1,), len(layer))
            total = total.to(layer.device) + torch.cat([sent.sum(dim=0), probabilities.sum(dim=0), tokens])
        return total

    def loss(self, sums: Tensor) -> Tensor:
        """The loss of all layers' sums; only the probabilities have a gradient."""
        sent, probabilities, tokens = torch.split(sums, [self.experts, self.experts, 1])
        tokens = tokens.detach()
        return self.coefficient * self.experts * (sent.detach() / tokens * probabilities / tokens).sum()


def router_loss_of(model: Any) -> RouterLoss | None:
    """The router loss of a model, if its configuration asks for one. Raises UserError where the family's is another."""
    theirs = next(filter(None, map(_balancing_of, type(model).__mro__)), None)
    if theirs is None or not getattr(model.config, "output_router_logits", False):
        return None
    experts, chosen = getattr(model, "num_experts", 0), getattr(model, "num_experts_per_tok", 0)
    coefficient = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if not experts or not chosen or coefficient is None or not _is_alike(RouterLoss(experts, chosen, 1.0), theirs):
        raise UserError(
            f"{type(model).__name__} has a router loss that is not known to be the same in stages; "
            "train it with --stages 1, or with output_router_logits false in its config.json"
        )
    return RouterLoss(experts, chosen, coefficient)


def _balancing_of(kind: type) -> Callable[..., Any] | None:
    """The load-balancing loss in the module of a family's class."""
    return getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)


def _is_alike(ours: RouterLoss, theirs: Callable[..., Any]) -> bool:
    """Whether a family's loss is the same for three layers of random logits."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(5, ours.experts, generator=generator) for _ in range(3))
    try:
        expected = torch.as_tensor(theirs(layers, ours.experts, ours.chosen))
    except Exception:  # it takes something else
        return False
    return torch.allclose(expected, ours.loss(ours.sums(layers)), rtol=1e-4)
