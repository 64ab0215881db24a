"""Experts of a text that were trained with other settings than their mixture, and uses that few make of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_texts import LENGTH, PREFIX, make
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from farflung.errors import UserError
from farflung.mixtures.folder import Mixture
from farflung.mixtures.joined import evaluate, join
from farflung.mixtures.texts import TextKind
from farflung.workloads.tokenizers import Bytes

ENDS = {"bos_token_id": 0, "eos_token_id": 0}
TEXTS = ("12+345", "koala mok", "99+9", "mouse")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make(tmp_path_factory.mktemp("mixture"))


def saved(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    Bytes().save(str(folder))
    return folder


def llama(folder: Path, vocabulary: int = 256, width: int = 16) -> Path:
    torch.manual_seed(width)
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return saved(LlamaForCausalLM(LlamaConfig(**sizes, **ENDS, vocab_size=vocabulary, initializer_range=0.3)), folder)


def gpt2(folder: Path, positions: int) -> Path:
    torch.manual_seed(5)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_positions": positions}
    return saved(GPT2LMHeadModel(GPT2Config(**sizes, **ENDS, initializer_range=0.5)), folder)


def together(mixture: Mixture, folder: Path, *experts: Path, **how: Any) -> Any:
    join(mixture, dict(enumerate(experts)), folder)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **how).eval()


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Texts filled up at the left, and where they are."""
    longest = max(map(len, TEXTS))
    tokens = torch.tensor([[0] * (longest - len(text)) + [*text.encode()] for text in TEXTS])
    return tokens, torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in TEXTS])


def test_an_expert_that_reads_too_few_tokens_is_refused(mixture: Mixture, tmp_path: Path) -> None:
    short = gpt2(tmp_path / "short", LENGTH // 2)
    for dense in (None, short):
        experts = {0: llama(tmp_path / "0"), 1: llama(tmp_path / "1") if dense else short}
        with pytest.raises(UserError, match=r"short reads at most 16 tokens, .* with --sequence-length 32") as e:
            evaluate(mixture, experts, dense, None)
        assert "\n" not in str(e.value)


def test_routers_are_not_asked_to_read_more_than_they_have_learnt_to(mixture: Mixture, tmp_path: Path) -> None:
    experts = {0: llama(tmp_path / "0")}
    with pytest.raises(UserError, match="prefix is 9, and the routers have learnt to read 8; give no more"):
        evaluate(mixture, experts, None, PREFIX + 1)
    assert evaluate(mixture, experts, None, PREFIX) == evaluate(mixture, experts, None, None)


def test_an_expert_that_has_diverged_is_told_of(mixture: Mixture, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(llama(tmp_path / "0"))
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    told = [*TextKind().judged(mixture, {0: saved(model, tmp_path / "1")}, None)]
    assert told[-1].startswith("mixture: ") and told[-1].endswith(" nats a token, perplexity inf")


def test_experts_may_have_room_for_unlike_numbers_of_tokens(mixture: Mixture, tmp_path: Path) -> None:
    """Some pad their embeddings to a round number."""
    model = together(mixture, tmp_path / "out", llama(tmp_path / "0", 256), llama(tmp_path / "1", 320, 32))
    tokens, mask = padded()
    chosen = model.route(tokens, mask)
    assert {*chosen.tolist()} == {0, 1}
    with torch.no_grad():
        found = model(tokens, mask, labels=tokens)
        for row, number in enumerate(chosen.tolist()):
            own = model.experts[number](tokens[row : row + 1], mask[row : row + 1]).logits[0]
            assert torch.allclose(found.logits[row, :, : own.shape[1]], own, atol=1e-5)
            assert (found.logits[row, :, own.shape[1] :] == -torch.inf).all()
    chances = found.logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])
    assert float(found.loss) == pytest.approx(-float(chances.mean()), rel=1e-5)


def test_places_of_tokens_go_to_the_experts(mixture: Mixture, tmp_path: Path) -> None:
    """Of texts filled up at the left, each begins at place 0, as without the filling."""
    model = together(mixture, tmp_path / "out", gpt2(tmp_path / "0", 64), gpt2(tmp_path / "1", 64))
    tokens, mask = padded()
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(tokens, mask, position_ids=places).logits[:, -1]
        alone = [model(torch.tensor([[*text.encode()]])).logits[0, -1] for text in TEXTS]
    assert torch.allclose(found, torch.stack(alone), atol=1e-5)


def test_texts_go_on_as_the_mixtures_own_settings_say(mixture: Mixture, tmp_path: Path) -> None:
    model = together(mixture, tmp_path / "out", llama(tmp_path / "0"), llama(tmp_path / "1"), dtype=torch.bfloat16)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    tokens, mask = padded()
    model.generation_config.max_new_tokens, model.generation_config.min_new_tokens = 3, 3
    model.generation_config.pad_token_id = 0
    found = model.generate(tokens, mask)
    assert found.shape == (len(TEXTS), tokens.shape[1] + 3)
    assert torch.equal(found, model.generate(tokens, mask, max_new_tokens=3, min_new_tokens=3, pad_token_id=0))


def test_single_settings_are_no_reason_for_a_warning(
    mixture: Mixture, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers will no longer take them beside a whole table of settings."""
    model = together(mixture, tmp_path / "out", llama(tmp_path / "0"), llama(tmp_path / "1"))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokens, mask = padded()
    before = model.generation_config.to_dict()
    found = model.generate(tokens, mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert found.shape[1] <= tokens.shape[1] + 3 and model.generation_config.to_dict() == before
    assert "deprecated" not in caplog.text


def test_what_ends_early_is_filled_up_as_the_settings_say(mixture: Mixture, tmp_path: Path) -> None:
    model = together(mixture, tmp_path / "out", llama(tmp_path / "0"), llama(tmp_path / "1"))
    tokens, mask = (both[:2] for both in padded())  # one for each expert, of which one ends at once
    free = model.generate(tokens, mask, max_new_tokens=8, do_sample=False)[:, tokens.shape[1] :]
    row = int(model.route(tokens, mask).argmax())
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": int(free[row, 0]), "pad_token_id": 7}
    found = model.generate(tokens, mask, generation_config=GenerationConfig(**how))
    assert torch.equal(found, model.generate(tokens, mask, **how))
    assert (found[row, tokens.shape[1] + 1 :] == 7).all()


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
def test_no_text_is_told_in_a_line(shape: tuple[int, int], mixture: Mixture, tmp_path: Path) -> None:
    model = together(mixture, tmp_path / "out", llama(tmp_path / "0"))
    with pytest.raises(ValueError, match="goes on with a text, and is given none; give input_ids"):
        model.generate(torch.zeros(shape, dtype=torch.int64), max_new_tokens=1)
