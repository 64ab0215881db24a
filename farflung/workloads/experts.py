"""Mixtures of experts: how many of them a token takes."""

from __future__ import annotations

from typing import Any

from torch import nn

EXPERTS = "experts"
"""transformers' name of a layer's experts: one module whose parameters hold all of them, or a list of modules."""

CHOSEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""Names of the setting that says how many experts a token takes."""


def chosen_experts(model: Any) -> int:
    """How many of a layer's experts a token takes; 0 where the configuration does not say."""
    settings = model.config.get_text_config()
    return next(filter(None, (getattr(settings, name, None) for name in CHOSEN)), 0)


def active_shares(model: Any) -> dict[int, float]:
    """For each parameter of experts, by its id, the share of its numbers that a token is multiplied with."""
    chosen = chosen_experts(model)
    shares: dict[int, float] = {}
    for key, module in model.named_modules():
        if key.rpartition(".")[2] == EXPERTS:
            held = dict(module.named_parameters())
            count = len(module) if isinstance(module, nn.ModuleList) else next(iter(held.values())).shape[0]
            shares |= {id(p): min(chosen / count, 1.0) if chosen else 1.0 for p in held.values()}
    return shares
