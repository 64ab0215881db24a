"""Islands of several real processes: the losses of one process, routes, rounds, faults, and runs that change layout."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from families import FAMILIES, ROUTED, gpt2
from patience import patience, until
from processes import run_replicas, train_together
from torch import Tensor
from torch_island import STEPS, observed
from warm import Python

from farflung.events import StartEvent, StepEvent, WarningEvent
from farflung.hooks.shards import merged
from farflung.networks import Conditions, Simulation
from farflung.pipeline.division import division_of
from farflung.pipeline.routes import random_routes
from farflung.pipeline.settings import IslandSettings
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.testing.hosts import processes_of
from farflung.training.export import export
from farflung.workloads import Language
from farflung.workloads.models import sequence_loss
from farflung.workloads.settings import LanguageSettings

pytestmark = pytest.mark.slow

LIBRARY = sysconfig.get_paths()["stdlib"]
COMMON: dict[str, Any] = {
    "method": "local",
    "replicas": 1,
    "sequence_length": 16,
    "batch_size": 8,
    "max_tokens": 100_000,
    "eval_sequences": 5,
    "lr": 3e-3,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": 4},
    "gpipe, recompute": {"stages": 4, "pipeline_schedule": "gpipe", "microbatches": 2, "recompute": True},
    "interleaved": {"stages": 4, "pipeline_schedule": "interleaved", "microbatches": 4},
    "tied": {"stages": 4, "microbatches": 4},
    "tied, zero-bubble, recompute": {
        "stages": 4,
        "microbatches": 4,
        "pipeline_schedule": "zero-bubble",
        "recompute": True,
    },
    "shards": {"shard": 4},
    "shards, stages, tied, offload": {"stages": 2, "shard": 2, "offload": True},
    "ddp": {"replicas": 2, "stages": 2, "method": "ddp"},
    "noloco": {"replicas": 2, "stages": 2, "method": "noloco", "every": 2},
    "streaming-diloco": {"replicas": 2, "shard": 2, "method": "streaming-diloco", "every": 4, "codec": "float32"},
    "dilocox": {"replicas": 2, "stages": 2, "method": "dilocox", "every": 2, "codec": "ef-lowrank8-int8"},
    "rda of shards": {"replicas": 2, "shard": 2, "method": "diloco", "every": 2, "fuse": "rda"},
    "rda of stages": {"replicas": 2, "stages": 2, "method": "diloco", "every": 2, "fuse": "rda"},
    "random routes": {"replicas": 2, "stages": 2, "routes": "random"},
    "8 bits": {"stages": 4, "boundary": "int8"},
    "mixture": {"stages": 2, "shard": 2, "data": f"0.6*{LIBRARY}/json/*.py + 0.4*{LIBRARY}/email/*.py"},
    "routers, interleaved": {"stages": 4, "pipeline_schedule": "interleaved", "microbatches": 4},
    "routers, zero-bubble": {"stages": 4, "pipeline_schedule": "zero-bubble", "microbatches": 4},
    "routers, shards, recompute": {"stages": 2, "shard": 2, "microbatches": 2, "recompute": True},
    "subspace": {"stages": 4, "boundary": "subspace8"},
    "poisoned": {"stages": 4},
    "poisoned, 8 bits": {"stages": 4, "boundary": "int8"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of eight layers, saved as a user would have them."""
    found = {}
    for name, config in {
        "plain": FAMILIES["llama"],
        "tied": gpt2(),
        "routers": ROUTED["minimax, with a buffer"],
    }.items():
        config = copy.deepcopy(config)  # other tests' model, too
        config.num_hidden_layers = 8
        folder = tmp_path_factory.mktemp(name)
        config.save_pretrained(folder)
        found[name] = str(folder)
    return found


def settings_of(name: str, folders: dict[str, str]) -> dict[str, Any]:
    kind = next((kind for kind in ("tied", "routers") if kind in name), "plain")
    return {**COMMON, "model": folders[kind], **LAYOUTS[name]}


@pytest.fixture(scope="module")
def islands(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes observed in every layout."""
    cases = json.dumps({name: settings_of(name, folders) for name in LAYOUTS})
    out = tmp_path_factory.mktemp("islands")
    return run_replicas(4, cases, "", out, script="torch_island.py")


def undivided(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What the replicas observe when one process has all of each, and computes as many sequences at a time."""
    divided = Settings.of(**settings)
    usual = {key: getattr(IslandSettings, key) for key in ("stages", "shard", "pipeline_schedule", "offload")}
    config = Settings.of(**{**settings, **usual, "microbatches": divided.island.shard * divided.island.parts})
    torch.set_num_threads(1)
    return Simulation(config.run.replicas, Conditions()).run(
        lambda network: observed(network, config, config.made_workload())
    )


INEXACT = ("random routes", "8 bits", "subspace", "dilocox", "poisoned", "poisoned, 8 bits")
EXACT = [name for name in LAYOUTS if name not in INEXACT]


@pytest.mark.parametrize("name", EXACT)
def test_every_layout_trains_the_same_model(name: str, islands: list[Any], folders: dict[str, str]) -> None:
    expected = undivided(settings_of(name, folders))
    for replica, whole in enumerate(expected):
        seen = [process[name] for process in islands if process[name]["coordinates"].replica == replica]
        for process in seen:
            assert process["losses"] == pytest.approx(whole["losses"], abs=1e-5)
            assert process["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-5)
            assert process["validation_losses"] == pytest.approx(whole["validation_losses"], abs=1e-5)
            assert len(whole["validation_losses"]) == (2 if name == "mixture" else 0)
            assert process["written"] == seen[0]["written"] and process["written"]
            assert process["peers"] == tuple(range(len(expected)))
        assert {key for process in seen for key in process["buffers"]} == whole["buffers"].keys()
        for process in seen:
            assert all(torch.equal(buffer, whole["buffers"][key]) for key, buffer in process["buffers"].items())
        weights = merged((process["coordinates"].shard, process["weights"]) for process in seen)
        assert weights.keys() == whole["weights"].keys()  # a tied head's copy belongs to nobody's weights
        for key, weight in weights.items():
            torch.testing.assert_close(weight, whole["weights"][key], atol=1e-3, rtol=1e-3)
        assert all(size(process["weights"]) < 2.2 / len(seen) * size(weights) for process in seen)


def test_compressed_rounds_of_stages_are_those_of_the_whole(islands: list[Any], folders: dict[str, str]) -> None:
    """Blocks of 8 bits are cut otherwise in stages than in the whole, so the last digits may differ."""
    for replica, whole in enumerate(undivided(settings_of("dilocox", folders))):
        seen = [process["dilocox"] for process in islands if process["dilocox"]["coordinates"].replica == replica]
        assert seen[0]["losses"] == pytest.approx(whole["losses"], abs=5e-3)


def size(weights: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in weights.values())


def test_lossy_boundaries_send_less_and_train(islands: list[Any]) -> None:
    plain, eight, subspace = (islands[1][name] for name in ("1f1b", "8 bits", "subspace"))
    assert 0.25 * plain["sent"] < eight["sent"] < 0.4 * plain["sent"]
    assert subspace["sent"] == plain["sent"] * 8 // 32
    assert eight["losses"] == pytest.approx(plain["losses"], abs=0.05) and eight["losses"] != plain["losses"]
    assert all(process["subspace"]["losses"] == islands[0]["subspace"]["losses"] for process in islands)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("poisoned", "loss is nan"), ("poisoned, 8 bits", "what passes between the stages is not finite")],
)
def test_a_step_that_is_not_finite_is_told_to_all_stages_and_over_with_the_next(
    name: str, fault: str, islands: list[Any]
) -> None:
    for process in islands:
        assert process[name] == [("", True), (fault, False), ("", True)]


def test_random_routes_mix_the_replicas_gradients(islands: list[Any], folders: dict[str, str]) -> None:
    """Against two whole replicas in one process, whose microbatches change models half-way."""
    config = Settings.of(**settings_of("random routes", folders))
    workload = cast(Language, config.made_workload())
    cut = division_of(config.island, workload, seed=0).spans
    replicas = [[workload.build(0, partial(workload.keep, span=span)) for span in cut] for _ in range(2)]
    optimizers = [
        [torch.optim.AdamW(stage.parameters(), lr=config.inner.lr, fused=True) for stage in r] for r in replicas
    ]
    seen = []
    for step in range(STEPS):
        losses: list[list[Tensor]] = [[], []]
        routes = random_routes(2, config.run.seed, step)
        for origin in range(2):
            ids = workload.sample_ids(0, origin, step, config.island.batch_size)
            for number, part in enumerate(workload.batch(ids).chunk(4)):
                target = routes.permutation(number, 0)[origin]
                hidden = replicas[origin][0].model(input_ids=part).last_hidden_state
                logits = replicas[target][1](inputs_embeds=hidden).logits
                losses[target].append(workload.outline().loss_function(logits=logits, labels=part, vocab_size=256) / 4)
        sum(loss for group in losses for loss in group).backward()  # type: ignore[union-attr]
        seen.append([float(sum(group).detach()) for group in losses])
        for replica, made in zip(replicas, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_([p for stage in replica for p in stage.parameters()], config.island.clip)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
    crossed = {random_routes(2, config.run.seed, s).permutation(m, 0) for s in range(STEPS) for m in range(4)}
    assert crossed == {(0, 1), (1, 0)}
    for process in islands:
        found = process["random routes"]
        assert found["losses"] == pytest.approx([losses[found["coordinates"].replica] for losses in seen], abs=1e-5)
        assert found["peers"] == (0, 1)


TRAIN = ("--model", "micro", "--sequence-length", "32", "--batch-size", "8", "--eval-sequences", "8")
TRAIN += ("--log-every", "1", "--max-tokens", "200000", "--deadline", str(patience(20)))


def losses_of(folder: Path) -> list[float]:
    return [event.loss for event in read_run(folder).of(0, StepEvent)]


def test_a_run_goes_on_with_other_stages_and_exports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ("--method", "diloco", "--every", "3", "--replicas", "1", "--stages", "2", "--steps", "8")
    arguments += ("--late-average", "1", "--inner", "adamw")
    train_together(2, *TRAIN, *arguments, "--checkpoint-every", "4", "--out", folder)
    undisturbed = losses_of(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["stages"] == 2 and summary["boundary_bytes"] == 2 * 8 * 8 * 32 * 64 * 4
    whole = sum(p.numel() for p in Language(LanguageSettings(model="micro")).build(0).parameters())
    assert summary["parameters"] == whole
    run = read_run(folder)
    assert run.replicas == [0] and list(run.parts) == [(0, 1)]
    assert [start.stage for (start, *_) in run.parts.values() if isinstance(start, StartEvent)] == [1]
    page = (folder / "report.html").read_text()
    assert "Inside the islands" in page and "<td>replica 0, stage 1</td>" in page

    for path in folder.glob("checkpoints/step-000008/*"):
        path.unlink()
    for path in folder.glob("checkpoints/averaged*"):
        path.unlink()
    train_together(2, "--resume", folder, "--stages", "1", "--shard", "2")
    assert losses_of(folder) == pytest.approx(undisturbed, abs=1e-5)
    assert not list(read_run(folder).of(0, WarningEvent))
    again = json.loads((folder / "summary.json").read_text())
    assert again["validation_loss_averaged"] == pytest.approx(summary["validation_loss_averaged"], abs=1e-5)

    export(folder, tmp_path / "model")
    from transformers import AutoModelForCausalLM

    held_out = Language(LanguageSettings(model="micro", sequence_length=32, max_tokens=200_000)).data.held_out(8)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        loss = float(sequence_loss(model, held_out))
    assert loss == pytest.approx(again["validation_loss_averaged"], abs=1e-5)


@pytest.fixture(scope="module")
def muon(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """The losses of 20 steps with Muon in one process, and the run of two shards without its last checkpoint."""
    folder = tmp_path_factory.mktemp("muon")
    arguments = (*TRAIN, "--method", "local", "--replicas", "1", "--steps", "20", "--checkpoint-every", "10")
    train_together(1, *arguments, "--out", folder / "whole")
    train_together(2, *arguments, "--shard", "2", "--out", folder / "shards")
    whole = losses_of(folder / "whole")
    assert losses_of(folder / "shards") == pytest.approx(whole, abs=1e-5)
    for path in (folder / "shards").glob("checkpoints/step-000020/*"):
        path.unlink()
    return whole, folder / "shards"


@pytest.mark.parametrize(("stages", "shard"), [(1, 1), (1, 2), (2, 1)])
def test_muon_of_shards_goes_on_in_any_layout(stages: int, shard: int, muon: Any, tmp_path: Path) -> None:
    """Its momenta, and AdamW's, are numbered in another order by each layout."""
    whole, shards = muon
    undisturbed = losses_of(shards)
    folder = Path(shutil.copytree(shards, tmp_path / "run"))
    train_together(stages * shard, "--resume", folder, "--stages", stages, "--shard", shard)
    assert losses_of(folder) == pytest.approx(whole, abs=1e-5)
    assert shard == 1 or losses_of(folder) == undisturbed


@pytest.mark.parametrize("way", ["microbatches", "sums"])
def test_a_stage_may_start_later_than_a_step_lasts_and_steps_have_their_own_limit(tmp_path: Path, way: str) -> None:
    told, _ = run_replicas(2, "late", way, tmp_path, script="torch_start.py")
    who = r"stage 1 of replica 0 \(.*, process \d+\)"
    assert re.fullmatch(
        f"PeerLostError: no word within [0-9.]+ s from one of: {who}; see which hangs, .* deadline", told
    )


def test_a_stage_that_does_not_start_is_named(tmp_path: Path) -> None:
    told, _ = run_replicas(2, "never", "", tmp_path, script="torch_start.py")
    who = r"stage 1 of replica 0 \(.*, process \d+\)"
    assert re.fullmatch(f"PeerLostError: not started within 1 s: {who}; see which hangs, or .* --starting", told)


def test_a_stage_that_dies_stops_its_island_and_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ("--method", "local", "--replicas", "1", "--stages", "2", "--steps", "4000", "--checkpoint-every", "5")
    run = Python("-m", "farflung", "train", *TRAIN, *arguments, "--out", folder)
    try:
        until(lambda: list(folder.glob("checkpoints/step-000005/replica-0-part-1-of-2.pt")) or run.poll())
        _, stage_1 = processes_of(folder)
        os.kill(stage_1, signal.SIGKILL)
        _, complaint = run.communicate(timeout=patience(60))
    finally:
        run.kill()
    assert "stage 1 of replica 0 failed: it died of signal 9" in complaint and f"--resume {folder}" in complaint
    told = "".join(path.read_text() for path in folder.rglob("logs/**/stderr.log"))
    assert f"lost stage 1 of replica 0 ({os.uname().nodename}, process {stage_1})" in told
