"""Mixtures of text whose folder is damaged, or half of another one: one line says what, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_texts import LENGTH, make
from processes import farflung
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from farflung.errors import UserError
from farflung.mixtures.folder import Mixture
from farflung.mixtures.joined import evaluate, example, join, route
from farflung.mixtures.texts import TextKind
from farflung.workloads.tokenizers import Bytes

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """Its two experts are in runs/0 and runs/1, exported."""
    mixture = make(tmp_path_factory.mktemp("mixture"))
    for number in range(2):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=256, bos_token_id=0, eos_token_id=0))
        model.save_pretrained(mixture.run(number))
        Bytes().save(str(mixture.run(number)))
    return mixture


@pytest.fixture
def mixture(whole: Mixture, tmp_path: Path) -> Mixture:
    """A copy."""
    shutil.copytree(whole.folder, tmp_path / "mix")
    return Mixture.read(tmp_path / "mix")


def experts(mixture: Mixture) -> dict[int, Path]:
    return {number: mixture.run(number) for number in range(2)}


def refused(told: str, act: Callable[[], object]) -> None:
    with pytest.raises(UserError, match=told) as error:
        act()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"experts": True, "dealt": [[1, 1]], "held_out": [1]},
        {"experts": 0, "dealt": [], "held_out": []},
        {"experts": 2.0},
        {"prefix": 0},
        {"prefix": "8"},
        {"prefix": LENGTH + 1},
        {"sequence_length": 0},
        {"sequence_length": str(LENGTH)},
        {"tokenizer": 5},
        {"data": "words.txt"},
        {"data": ["words.txt"]},
        {"dealt": [1, 2]},
        {"dealt": [["a", "b"], ["c", "d"]]},
        {"held_out": ["a", "b"]},
        {"held_out": [0, 0]},
        {"rounds": 5},
    ],
    ids=str,
)
def test_a_manifest_edited_by_hand_is_told_of_when_it_is_read(changed: dict[str, Any], mixture: Mixture) -> None:
    path = mixture.folder / "mixture.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    refused(r"mixture\.json is damaged .*; split the data again", lambda: Mixture.read(mixture.folder))


def test_rounds_edited_by_hand_are_told_of_when_they_are_shown(mixture: Mixture) -> None:
    path = mixture.folder / "mixture.json"
    table = json.loads(path.read_text())
    for rounds in ([{"number": 1}], [table["rounds"][0] | {"loss": "x"}]):
        path.write_text(json.dumps(table | {"rounds": rounds}))
        edited = Mixture.read(mixture.folder)
        refused(r"mixture\.json is damaged", lambda edited=edited: [*TextKind().told(edited)])  # type: ignore[misc]


def damage(folder: Path, how: str) -> None:
    weights = folder / WEIGHTS
    if how == "no folder":
        shutil.rmtree(folder)
    elif how == "no configuration":
        (folder / "config.json").unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "half of the weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        table = load_file(weights)
        if how == "a weight less":
            del table["model.norm.weight"]
        save_file({name: value * (torch.nan if how == "no numbers" else 1) for name, value in table.items()}, weights)


DAMAGES = ["no folder", "no configuration", "no weights", "half of the weights", "a weight less", "no numbers"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_router_that_cannot_be_read_is_told_of_and_no_text_goes_to_it(how: str, mixture: Mixture) -> None:
    damage(mixture.router(1), how)
    told = r"router-1 (holds no model|lacks weights|has weights that are no finite).*copy the mixture's folder again"
    refused(told, lambda: route(mixture, "12+3"))
    refused(told, lambda: evaluate(mixture, experts(mixture), None, None))
    refused(told, lambda: join(mixture, experts(mixture), mixture.folder.parent / "out"))


@pytest.mark.parametrize("how", ["no weights", "half of the weights", "a weight less", "no numbers"])
def test_an_exported_expert_that_cannot_be_read_is_told_of(how: str, mixture: Mixture) -> None:
    damage(mixture.run(1), how)
    told = r"runs/1 (holds no model|lacks weights|has weights that are no finite).*export that run again"
    refused(told, lambda: evaluate(mixture, experts(mixture), None, None))
    refused(told, lambda: join(mixture, experts(mixture), mixture.folder.parent / "out"))


def test_an_experts_text_that_is_missing_or_of_another_split_is_told_of(mixture: Mixture, tmp_path: Path) -> None:
    shutil.rmtree(mixture.store(1))
    missing = r"expert-1 is missing, or half of it; copy the mixture's folder again"
    refused(missing, lambda: evaluate(mixture, experts(mixture), None, None))
    refused(missing, lambda: example(mixture, 1))
    shutil.copytree(mixture.store(0), mixture.store(1))
    shutil.copy(mixture.store(0) / "training.bin", mixture.store(1) / "held-out.bin")
    path = mixture.store(1) / "store.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"held_out": table["training"]}))
    refused(
        r"expert-1 has another number of sequences than the mixture says",
        lambda: evaluate(mixture, experts(mixture), None, None),
    )


def test_an_expert_that_reads_too_few_tokens_is_not_exported_either(mixture: Mixture, tmp_path: Path) -> None:
    shutil.rmtree(mixture.run(1))
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=256, n_positions=16)).save_pretrained(
        mixture.run(1)
    )
    Bytes().save(str(mixture.run(1)))
    refused(
        "runs/1 reads at most 16 tokens, .* with --sequence-length 32",
        lambda: join(mixture, experts(mixture), tmp_path / "out"),
    )


@pytest.mark.slow
def test_the_commands_name_the_run_that_is_wrong_and_write_nothing(mixture: Mixture, tmp_path: Path) -> None:
    """They export it first, into a folder that is gone when one reads the error."""
    shutil.rmtree(mixture.run(1))
    flags = (
        "--model",
        "micro",
        "--sequence-length",
        LENGTH // 2,
        "--network",
        "simulated",
        "--steps",
        2,
        "--warmup",
        1,
    )
    run = mixture.run(1)
    trained = farflung("train", "--data", mixture.store(1), "--out", run, *flags, "--replicas", 2, "--every", 2)
    assert trained.returncode == 0, trained.stderr
    for action in (("evaluate", mixture.folder), ("export", mixture.folder, tmp_path / "out")):
        found = farflung("mixture", *action)
        assert f"farflung: {run} reads at most 16 tokens" in found.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_place_of_a_run_is_told_of(mixture: Mixture) -> None:
    shutil.rmtree(mixture.run(1))
    mixture.run(1).write_text("a run")
    found = farflung("mixture", "evaluate", mixture.folder)
    assert f"farflung: {mixture.run(1)} is a file; in its place, give the folder of a run" in found.stderr


def test_bytes_that_are_no_text_are_told_of(mixture: Mixture) -> None:
    """So does Python take an argument that is no UTF-8."""
    refused("the text is no Unicode", lambda: route(mixture, "12\udcff"))
