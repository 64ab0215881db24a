"""What the planner knows of models: against published sizes, against torch's count of operations, and by hand."""

from pathlib import Path

import pytest
import torch
from families import COMMON, FAMILIES
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from farflung.errors import UserError
from farflung.pipeline.balance import Span
from farflung.planner.architecture import Architecture, architecture_of
from farflung.planner.saved import counted

QWEN2_57B = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2_57B |= {"vocab_size": 151_936, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}

DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 2, "num_key_value_heads": 4}


def known(config: PretrainedConfig, folder: Path, length: int = 16) -> Architecture:
    config.save_pretrained(folder)
    return architecture_of(str(folder), length)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (DeepseekV3Config(), 671.0e9, 37.6e9),
        (MixtralConfig(), 46.7e9, 12.9e9),
        (Qwen2MoeConfig(**QWEN2_57B, shared_expert_intermediate_size=20_480), 57.4e9, 14.2e9),
    ],
)
def test_models_of_experts_have_the_published_sizes(
    config: PretrainedConfig, total: float, active: float, tmp_path: Path
) -> None:
    model = known(config, tmp_path)
    assert model.parameters == pytest.approx(total, rel=0.002)
    assert model.active == pytest.approx(active, rel=0.01)
    # Only matrices of layers and head are multiplied with: all that is active but the embeddings, and a few vectors.
    work = sum(layer.work for layer in model.layers) + model.last.work
    assert work == pytest.approx(model.active - model.first.parameters, rel=0.001)


FAMILIES_OF_EXPERTS = {
    "deepseek": DeepseekV3Config(**COMMON, **DEEPSEEK),
    "qwen2 moe": Qwen2MoeConfig(
        **COMMON, num_key_value_heads=2, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, decoder_sparse_step=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FAMILIES, *FAMILIES_OF_EXPERTS])
def test_a_step_has_the_operations_that_torch_counts(name: str, tmp_path: Path) -> None:
    config = {**FAMILIES, **FAMILIES_OF_EXPERTS}[name]
    model = known(config, tmp_path)
    torch.manual_seed(0)
    real = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    assert model.parameters == sum(p.numel() for p in real.parameters())
    tokens = torch.randint(256, (4, 16))
    with FlopCounterMode(display=False) as counter:
        real(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    whole = Span(0, len(model.layers), first=True, last=True)
    assert 64 * model.flops_per_token(whole, 16) == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize(("name", "last"), [("llama", "mlp.down_proj.weight"), ("gpt2", "mlp.c_proj.weight")])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_layer_that_is_computed_again_does_without_its_last_product(
    name: str, last: str, precision: str, tmp_path: Path
) -> None:
    model = known(FAMILIES[name], tmp_path)
    (product,) = (p.numel() for key, p in model.outline.named_parameters() if key.endswith(f"0.{last}"))
    assert counted(model, 4, 16, precision).spared == pytest.approx(product / model.layers[0].work)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_have_what_training_gives_them(stages: int, tmp_path: Path) -> None:
    """Layers of experts are larger than those without, so layers are not dealt out evenly."""
    model = known(FAMILIES_OF_EXPERTS["deepseek"], tmp_path)
    spans = model.spans(stages)
    assert [span.end for span in spans[:-1]] == [span.begin for span in spans[1:]]
    split = model.kept_cells(stages, 1)
    assert sum(map(len, split)) == len(model.cells)
    whole = Span(0, 5, first=True, last=True)
    parts = [model.flops_per_token(span, 16) for span in spans]
    assert sum(parts) == pytest.approx(model.flops_per_token(whole, 16))
    if stages == 2:
        assert spans[0].end == 3  # two dense layers and the embeddings; three of experts and the head


@pytest.mark.parametrize(("experts", "width"), [(16, 256), (32, 512)])
def test_of_experts_only_those_that_a_token_takes_are_work_that_stages_share(
    experts: int, width: int, tmp_path: Path
) -> None:
    """No other cut has a smaller largest share, of all parameters or of what a token is multiplied with."""
    model = known(
        DeepseekV3Config(**{**COMMON, **DEEPSEEK, "n_routed_experts": experts, "intermediate_size": width}), tmp_path
    )
    memory = [model.first.parameters, *(layer.parameters for layer in model.layers), model.last.parameters]
    work = [0.0, *(layer.work for layer in model.layers), model.last.work]

    def largest_share(cut: int) -> float:
        sides = [(sum(kind[: cut + 1]) / sum(kind)) for kind in (memory, work)]
        return max(max(side, 1 - side) for side in sides)

    assert model.spans(2)[0].end == min(range(1, len(model.layers)), key=largest_share)


def test_experts_of_which_it_is_not_known_how_many_work_are_refused(tmp_path: Path) -> None:
    config = DeepseekV2Config(**COMMON, **{**DEEPSEEK, "num_experts_per_tok": None})
    with pytest.raises(UserError, match="has experts, but does not say how many of them a token takes"):
        known(config, tmp_path)
