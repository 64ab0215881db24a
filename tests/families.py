"""Small models of the families that are split into stages."""

from __future__ import annotations

from typing import Any

from transformers import (
    GPT2Config,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from farflung.pipeline.balance import spans
from farflung.workloads import models
from farflung.workloads.base import Span
from farflung.workloads.decoder import check_passes_on, loads

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TOKENS = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def opt(**settings: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "ffn_dim": 64}
    common = {"max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    return OPTConfig(**{**TOKENS, **sizes, **common, **settings})


def gpt2(**settings: Any) -> PretrainedConfig:
    sizes = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64}
    return GPT2Config(**{**TOKENS, **sizes, **NO_DROPOUT, **settings})


FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama, tied": LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2, sliding": Qwen2Config(
        **COMMON, num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "qwen3": Qwen3Config(**COMMON, **HEADS),
    "opt": opt(),
    "gpt2": gpt2(),
    "mixtral": MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=2),
}
BALANCED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
ROUTED: dict[str, PretrainedConfig] = {
    "minimax, with a buffer": MiniMaxM2Config(
        **COMMON, **HEADS, **BALANCED, num_local_experts=4, num_experts_per_tok=2
    ),
    "mixtral": MixtralConfig(**COMMON, **BALANCED, num_key_value_heads=2, num_local_experts=4),
    "qwen3, first and last dense": Qwen3MoeConfig(
        **COMMON,
        **HEADS,
        **BALANCED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[0, 4],
    ),
    "granite": GraniteMoeConfig(
        **COMMON, **BALANCED, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, logits_scaling=2.0
    ),
}
"""Mixtures of experts whose routers are trained to use all experts alike."""


def cut(config: PretrainedConfig, count: int) -> list[Span]:
    """The spans of a model that can be split into so many pieces."""
    found = spans(*loads(models.outline(config)), count)
    check_passes_on(config)
    return found
