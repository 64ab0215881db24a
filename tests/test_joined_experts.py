"""Experts together: each text is the work of one, and what comes out is what that one alone would give."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mixed_texts import LENGTH, PREFIX, make
from patience import patience
from processes import farflung
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from farflung.errors import UserError
from farflung.mixtures.folder import Mixture
from farflung.mixtures.joined import evaluate, join
from farflung.workloads import store
from farflung.workloads.tokenizers import Bytes

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return make(tmp_path_factory.mktemp("mixture"), experts=3, rounds=4)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models that differ in size and in whether the head is the embeddings; large weights make them differ much."""
    folder = tmp_path_factory.mktemp("experts")
    for number, width in enumerate((16, 32, 16)):
        torch.manual_seed(number)
        sizes = {**SIZES, "hidden_size": width, "intermediate_size": width, "initializer_range": 0.3}
        LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=number == 2)).save_pretrained(folder / str(number))
        Bytes().save(str(folder / str(number)))
    return {number: folder / str(number) for number in range(3)}


@pytest.fixture(scope="module")
def joined(mixture: Mixture, experts: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined") / "out"
    join(mixture, experts, folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


@torch.no_grad()
def likelihood(model: nn.Module, text: list[int]) -> float:
    """Of a text under a model, token by token, behind byte 0."""
    scores = model(torch.tensor([[0, *text[:-1]]])).logits[0].double().log_softmax(-1)
    return sum(float(scores[place, token]) for place, token in enumerate(text))


def routers_of(mixture: Mixture) -> list[Any]:
    return [load(mixture.router(number)) for number in range(mixture.experts)]


def best_of(routers: dict[int, Any], text: list[int]) -> int:
    return max(routers, key=lambda number: likelihood(routers[number], text[:PREFIX]))


def held_out(mixture: Mixture) -> list[list[int]]:
    parts = [store.read(mixture.store(number)).held_out.reshape(-1, LENGTH) for number in range(mixture.experts)]
    return [row.tolist() for row in np.concatenate(parts)]


@torch.no_grad()
def loss_of(model: Any, text: list[int]) -> float:
    tokens = torch.tensor([text])
    return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize("there", [(0, 1, 2), (0, 2), (1,)], ids=str)
def test_each_sequence_is_judged_by_the_best_expert_that_there_is(
    there: tuple[int, ...], mixture: Mixture, experts: dict[int, Path]
) -> None:
    routers = dict(enumerate(routers_of(mixture)))
    models = {number: load(experts[number]) for number in there}
    losses: dict[int, list[float]] = {number: [] for number in there}
    instead = dict.fromkeys(there, 0)
    for text in held_out(mixture):
        chosen = best_of({number: routers[number] for number in there}, text)
        losses[chosen].append(loss_of(models[chosen], text))
        instead[chosen] += best_of(routers, text) not in there
    score = evaluate(mixture, {number: experts[number] for number in there}, experts[0], None)
    for one in score.experts:
        assert (one.sequences, one.instead) == (len(losses[one.number]), instead[one.number])
        assert one.loss == pytest.approx(np.mean(losses[one.number]), rel=1e-5)
    assert score.loss == pytest.approx(np.mean(np.concatenate([*losses.values()])), rel=1e-5)
    dense = load(experts[0])
    assert score.dense == pytest.approx(np.mean([loss_of(dense, text) for text in held_out(mixture)]), rel=1e-5)


def padded(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Filled up at the left, as for generation."""
    rows, longest = [list(text.encode()) for text in texts], max(map(len, texts))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return tokens, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])


TEXTS = ["12+345", "koala mok", "99+9", "mouse", "7", "a"]


def test_an_exported_mixture_gives_what_the_experts_of_its_texts_give(
    joined: Path, mixture: Mixture, experts: dict[int, Path]
) -> None:
    model, routers = load(joined), dict(enumerate(routers_of(mixture)))
    tokens, mask = padded(TEXTS)
    chosen = [best_of(routers, list(text.encode())) for text in TEXTS]
    assert model.route(tokens, mask).tolist() == chosen and len(set(chosen)) > 1
    with torch.no_grad():
        found = model(input_ids=tokens, attention_mask=mask).logits
        for row, expert in enumerate(chosen):
            own = load(experts[expert])(input_ids=tokens[row : row + 1], attention_mask=mask[row : row + 1]).logits
            assert torch.allclose(found[row][mask[row] == 1], own[0][mask[row] == 1], atol=1e-5)
        labels = torch.where(mask == 1, tokens, -100)
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    predicted = labels[:, 1:] != -100
    chances = found[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    assert float(loss) == pytest.approx(-float(chances[predicted].mean()), rel=1e-5)


@pytest.mark.parametrize("each", [1, 3])
def test_each_text_goes_on_as_its_expert_would_go_on(
    each: int, joined: Path, mixture: Mixture, experts: dict[int, Path]
) -> None:
    """By beams, which take no chance; several continuations of a text lie one after the other."""
    how = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": each, "do_sample": False, "pad_token_id": 0}
    tokens, mask = padded(TEXTS)
    found = load(joined).generate(input_ids=tokens, attention_mask=mask, **how).unflatten(0, (-1, each))
    routers = dict(enumerate(routers_of(mixture)))
    for row, text in enumerate(TEXTS):
        expert = load(experts[best_of(routers, list(text.encode()))])
        own = expert.generate(tokens[row : row + 1], attention_mask=mask[row : row + 1], **how)
        assert found[row, :, : own.shape[1]].tolist() == own.tolist()
        assert not found[row, :, own.shape[1] :].any()


def test_texts_of_several_experts_have_tokens_in_common_alone(joined: Path) -> None:
    model, (tokens, mask) = load(joined), padded(TEXTS)
    with pytest.raises(ValueError, match="give one text at a time"):
        model.generate(tokens, mask, max_new_tokens=2, return_dict_in_generate=True)
    one = model.generate(tokens[:1], mask[:1], max_new_tokens=2, return_dict_in_generate=True, output_scores=True)
    assert len(one.scores) <= 2
    with pytest.raises(ValueError, match="give input_ids"):
        model.generate(max_new_tokens=2)


def test_a_mixture_is_the_same_after_it_was_saved_again(joined: Path, tmp_path: Path) -> None:
    model = load(joined)
    model.save_pretrained(tmp_path)
    again, tokens = load(tmp_path), padded(TEXTS)[0]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_without_an_expert_its_router_is_not_exported_either(
    mixture: Mixture, experts: dict[int, Path], tmp_path: Path
) -> None:
    join(mixture, {number: experts[number] for number in (0, 2)}, tmp_path / "out")
    model, (tokens, mask) = load(tmp_path / "out"), padded(TEXTS)
    routers = {number: one for number, one in enumerate(routers_of(mixture)) if number != 1}
    assert model.config.numbers == [0, 2]
    found = [model.config.numbers[place] for place in model.route(tokens, mask).tolist()]
    assert found == [best_of(routers, list(text.encode())) for text in TEXTS]


def test_an_expert_of_other_tokens_is_refused(mixture: Mixture, experts: dict[int, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(experts[0], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"] = 98, 97
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    uses: list[Callable[[], object]] = [
        lambda: evaluate(mixture, {**experts, 1: other}, None, None),
        lambda: evaluate(mixture, experts, other, None),
        lambda: join(mixture, {**experts, 1: other}, tmp_path / "out"),
    ]
    for use in uses:
        with pytest.raises(UserError, match="other has other tokens than the mixture") as error:
            use()
        assert "\n" not in str(error.value)


def test_an_expert_that_draws_is_refused(mixture: Mixture, experts: dict[int, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    with pytest.raises(UserError, match="holds no model of text, as it has no tokenizer; train it on") as error:
        join(mixture, {**experts, 1: tmp_path}, tmp_path / "out")
    assert "\n" not in str(error.value)


ELSEWHERE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
write = pipeline("text-generation", model=model, tokenizer=tokenizer)
texts = [one["generated_text"] for one in write("12+3", max_new_tokens=4, num_return_sequences=2, do_sample=True)]
assert len(texts) == 2 and all(text.startswith("12+3") for text in texts), texts
assert not any(name.partition(".")[0] == "farflung" for name in sys.modules)
"""


@pytest.mark.slow
def test_an_exported_mixture_needs_no_farflung(joined: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, str(joined)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_experts_trained_by_the_command_are_judged_and_joined(mixture: Mixture, tmp_path: Path) -> None:
    mix = tmp_path / "mix"
    shutil.copytree(mixture.folder, mix)
    few = ("--model", "micro", "--sequence-length", LENGTH, "--network", "simulated", "--steps", 8, "--warmup", 2)
    for number in (0, 2):
        where = ("--data", mix / f"expert-{number}", "--out", mix / "runs" / str(number))
        done = farflung("train", *where, *few, "--replicas", 2, "--every", 4)
        assert done.returncode == 0, done.stderr
    judged = farflung("mixture", "evaluate", mix, "--dense", mix / "runs" / "0")
    assert judged.returncode == 0, judged.stderr
    assert "expert 1 is missing: there is no" in judged.stderr and "next best" in judged.stderr
    lines = judged.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["expert 0", "expert 2", "mixture", "dense"]
    assert sum(int(line.split()[2]) for line in lines[:2]) == sum(mixture.held_out)
    missing = re.findall(r"\((\d+) of them of missing experts\)", judged.stdout)
    assert sum(map(int, missing)) == mixture.held_out[1]
    exported = farflung("mixture", "export", mix, tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    assert "holds 2 of 3 experts" in exported.stdout
    model = load(tmp_path / "out")
    own = farflung("export", mix / "runs" / "2", tmp_path / "own")
    assert own.returncode == 0, own.stderr
    for name, weight in load(tmp_path / "own").state_dict().items():
        assert torch.equal(model.experts[1].state_dict()[name], weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)("12").input_ids == [49, 50]
    again = farflung("mixture", "export", mix, tmp_path / "out")
    assert again.returncode == 2 and "out exists already" in again.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"mix", "out", "own"}
