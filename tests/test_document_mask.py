"""Attention within documents: what a token is predicted from."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from families import FAMILIES, gpt2
from processes import SMALL, farflung
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, PretrainedConfig, Qwen3NextConfig

from farflung.errors import UserError
from farflung.workloads import decoder, models
from farflung.workloads.base import Span
from farflung.workloads.language import Language
from farflung.workloads.settings import LanguageSettings

END = 0
DOCUMENTS = [[5, 6, 7, 8, END], [9, END], [11, 12, 13], [END]]
"""The last but one is cut, as at a sequence's end."""


def made(config: PretrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "qwen2, sliding", "qwen3", "gpt2"])
def test_each_token_is_predicted_from_its_own_document_alone(name: str) -> None:
    model = made(FAMILIES[name] if name != "gpt2" else gpt2())
    tokens = torch.tensor([[*chain(*DOCUMENTS[:3])]])
    alone = torch.cat([model(input_ids=torch.tensor([one])).logits[0] for one in DOCUMENTS[:3]])
    expected = nn.functional.cross_entropy(alone[:-1], tokens[0, 1:])
    positions = models.within_documents(tokens, END)
    for training in (False, True):
        found = models.sequence_loss(model.train(training), tokens, positions=positions)
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(models.sequence_loss(model.eval(), tokens)) != pytest.approx(float(expected), rel=1e-5)
    models.check_keeps_to_documents(model)


def test_positions_begin_again_behind_each_end() -> None:
    rows = torch.tensor([[*chain(*DOCUMENTS)], [END, END, 5, 6, 7, 8, 9, END, 1, 2, 3], [1] * 11])
    assert models.within_documents(rows, END).tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3],
        [0, 0, 0, 1, 2, 3, 4, 5, 0, 1, 2],
        list(range(11)),
    ]


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=256),
        MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=256, state_size=4),
    ],
    ids=["alibi", "recurrent"],
)
def test_models_that_cannot_are_refused(config: PretrainedConfig) -> None:
    with pytest.raises(UserError, match="ForCausalLM cannot keep its attention within documents; leave out"):
        models.check_keeps_to_documents(made(config))


@pytest.mark.parametrize("name", ["llama", "qwen2, sliding", "qwen3", "gpt2"])
def test_pieces_in_a_row_keep_to_documents_as_the_whole_does(name: str) -> None:
    config = FAMILIES[name] if name != "gpt2" else gpt2()
    decoder.check_keeps_to_documents(config)
    whole = models.outline(config)
    models.materialise(whole, seed=3)
    tokens = torch.tensor([[*chain(*DOCUMENTS)], [5, END, 6, 7, 8, END, 9, 1, 2, 3, 4]])
    positions = partial(models.within_documents, end=END)
    passing = tokens
    for span in (Span(0, 1, first=True, last=False), Span(1, 9, first=False, last=True)):
        model = models.outline(config)
        decoder.keep(model, span)
        models.materialise(model, seed=3)
        passing = decoder.Piece(model.train(), span, positions=positions)(passing, batch=tokens)
    torch.testing.assert_close(passing, whole(input_ids=tokens, position_ids=positions(tokens), use_cache=False).logits)
    assert not torch.allclose(passing, whole(input_ids=tokens).logits, atol=1e-3)


def test_pieces_of_models_of_which_one_kind_of_layer_cannot_are_refused() -> None:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 16}
    kinds = ["full_attention", "linear_attention"]
    config = Qwen3NextConfig(hidden_size=32, num_hidden_layers=2, layer_types=kinds, vocab_size=256, **heads, **widths)
    decoder.check_passes_on(config)
    with pytest.raises(UserError, match="Qwen3NextForCausalLM cannot keep its attention within documents; leave out"):
        decoder.check_keeps_to_documents(config)


def test_a_chat_is_one_document_though_its_answers_end_as_a_text_does(tmp_path: Path) -> None:
    said = [{"role": role, "content": "so"} for role in ("user", "assistant", "user", "assistant")]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 9)
    plain, masked = (
        Language(LanguageSettings(model="micro", data=str(tmp_path / "chats.jsonl"), document_mask=mask))
        for mask in (False, True)
    )
    masked.check()
    model, batch = plain.build(0), plain.batch(plain.sample_ids(0, 0, 0, 2))
    assert torch.equal(masked.loss(model, batch), plain.loss(model, batch))


def test_a_tokenizer_that_ends_a_text_by_a_token_of_texts_tells_no_documents_apart(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(vocab={"!": 0, "a": 1, "b": 2}, merges=[]))
    (tmp_path / "a.txt").write_text("ab!" * 4000)

    def check(end: str | None, masked: bool) -> None:
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end).save_pretrained(tmp_path / "made")
        one = LanguageSettings(model="micro", data=str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "made"))
        Language(replace(one, document_mask=masked)).check()

    check("b", masked=True)
    check(None, masked=False)
    with pytest.raises(UserError, match=r"no token for the end of a text.*eos_token, or leave out --document-mask"):
        check(None, masked=True)


@pytest.mark.slow
def test_a_run_with_masked_documents_is_another_one_and_judged_so_also_in_stages_and_shards(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{number} " * 3}) + "\n" for number in range(400)))
    common = ["train", *SMALL, "--data", str(text), "--method", "local", "--replicas", "1", "--steps", "10"]
    divided = ["--stages", "2", "--shard", "2", "--microbatches", "2", "--batch-size", "4", "--document-mask"]
    whole = ["--batch-size", "4", "--document-mask"]
    for out, more in (("plain", ["--batch-size", "4"]), ("masked", whole), ("divided", divided)):
        run = farflung(*common, *more, "--out", out, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    losses = [
        json.loads((tmp_path / out / "summary.json").read_text())["validation_loss"]
        for out in ("plain", "masked", "divided")
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)
    together = ["--network", "simulated", "--batched-replicas", "--document-mask", "--out", "fourth"]
    refused = farflung(*common, *together, cwd=tmp_path)
    assert refused.returncode == 2 and "leave out --document-mask" in refused.stderr
