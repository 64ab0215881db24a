"""`--memory` with `--shard`: all shards of a replica follow one plan, with the bits of a run that keeps everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import run_replicas, same
from test_memory_training import llama
from torch_memory import MARK

from farflung.hooks.shared_memory import SHARED
from farflung.planner.architecture import architecture_of
from farflung.planner.fitting import Stage, Worker
from farflung.settings import Settings

pytestmark = pytest.mark.slow

PARTS = [1, 2]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two shards has seen."""
    folder: Path = tmp_path_factory.mktemp("shards")
    return run_replicas(2, llama(folder / "model", 4), "", folder, script="torch_memory.py")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", ["resumed", "all modes", "all modes, resumed"])
def test_shards_with_little_memory_are_bit_for_bit_those_with_much(
    name: str, parts: int, shards: list[dict[str, Any]]
) -> None:
    for seen in shards:
        assert not seen[f"{name} {parts}"]["refused"]
        assert same(seen[f"{name} {parts}"]["weights"], seen[f"much {parts}"]["weights"])


@pytest.mark.parametrize("parts", PARTS)
def test_shards_follow_one_plan_and_keep_it(parts: int, shards: list[dict[str, Any]]) -> None:
    one, other = shards
    assert one[f"least {parts}"]["refused"] == other[f"least {parts}"]["refused"]
    for name in (f"kept {parts}", f"followed {parts}", f"given {parts}"):
        assert one[name]["plan"] == other[name]["plan"] and one[name]["profile"] == other[name]["profile"]
        assert (one[name]["plan"]["prefetch_bytes"] == MARK) is (name != f"kept {parts}")
    assert {layer["mode"] for layer in one[f"kept {parts}"]["plan"]["layers"]} != {"keep"}


def test_a_plan_that_one_shard_has_lost_is_made_anew_by_both(shards: list[dict[str, Any]]) -> None:
    one, other = shards
    assert one["anew"]["plan"] == other["anew"]["plan"] and one["anew"]["plan"]["prefetch_bytes"] != MARK
    for seen in shards:
        assert same(seen["lost"]["weights"], seen["much 1"]["weights"])


@pytest.mark.parametrize("parts", PARTS)
def test_the_planner_counts_of_shards_what_they_measure(
    parts: int, shards: list[dict[str, Any]], tmp_path: Path
) -> None:
    """What they have, save and gather; what a process holds besides, and seconds, are the machine's."""
    made = {"model": llama(tmp_path / "model", 4), "tokenizer": "bytes", "sequence_length": 64, "batch_size": 16}
    asked = Settings.of(**made, method="local", inner="adamw", shard=2, microbatches=parts)
    model, worker = architecture_of(made["model"]), Worker("cpu", 1e9, 1e9, 1e9, 1e9, 1e9, "far")
    (span,) = model.spans(1)
    planned = Stage(model, asked, asked.method(), worker, 0, span).profile
    measured = shards[0][f"kept {parts}"]["profile"]
    for one, found in zip(planned.layers, measured["layers"], strict=True):
        sizes = ("weight_bytes", "gradient_bytes", "moment_bytes")
        assert [vars(one)[name] for name in sizes] == pytest.approx([found[name] for name in sizes], rel=0.01)
        assert one.saved_bytes == pytest.approx(found["saved_bytes"], rel=0.1)
    outside = planned.before.weight_bytes + planned.head.weight_bytes
    assert outside == pytest.approx(measured["before"]["weight_bytes"], rel=0.01)
    whole = sum(4 * part.parameters for part in model.parts(span))
    layers = [4 * layer.parameters for layer in model.layers]
    alone = Settings.of(**made | {"batch_size": 8}, method="local", inner="adamw", microbatches=parts)
    besides = planned.fixed_bytes - Stage(model, alone, alone.method(), worker, 0, span).profile.fixed_bytes
    assert besides == 2 * (whole - sum(layers)) + max(layers) + SHARED


def test_what_shards_sum_up_of_several_microbatches_is_whole_until_the_step_is_over(
    shards: list[dict[str, Any]],
) -> None:
    of_one, of_two = (shards[0][f"kept {parts}"]["profile"]["layers"][0] for parts in PARTS)
    assert of_one["gradient_bytes"] == of_one["weight_bytes"]
    assert of_two["gradient_bytes"] == 2 * of_two["weight_bytes"]
    assert of_one["moment_bytes"] == of_two["moment_bytes"] >= 2 * of_one["weight_bytes"]
