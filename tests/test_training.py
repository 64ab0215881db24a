"""Whole runs on the simulated network: what they leave behind, and going on bit for bit after any interruption."""

import json
import math
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from processes import same, same_weights, saved, trained_here
from warm import Python

from farflung.cli.results import tell_result
from farflung.errors import UserError
from farflung.outer import DivergedError
from farflung.settings import Settings
from farflung.training import checkpoint, launch
from farflung.training.beginning import clear
from farflung.training.events import EventLog
from farflung.training.export import export
from farflung.training.learning_rate import lr_scale
from farflung.workloads import models

STEPS = 24
SMALL: dict[str, Any] = {
    "model": "micro",
    "network": "simulated",
    "replicas": 3,
    "steps": STEPS,
    "every": 5,
    "batch_size": 2,
    "sequence_length": 32,
    "eval_sequences": 4,
    "eval_every": 8,
    "log_every": 4,
    "checkpoint_every": 6,
    "warmup": 2,
    "max_tokens": 200_000,
}


def run(folder: Path, resume: bool = False, **settings: Any) -> dict[str, Any]:
    trained_here(folder, resume, **SMALL | settings)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def events(folder: Path, replica: int, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events" / f"replica-{replica}.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def final_weights(folder: Path, replicas: int = 3) -> list[dict[str, torch.Tensor]]:
    return [saved(folder, STEPS, replica)["model"] for replica in range(replicas)]


def assert_means(averaged: dict[str, torch.Tensor], weights: list[dict[str, torch.Tensor]]) -> None:
    assert averaged.keys() == weights[0].keys()
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, torch.stack([w[name] for w in weights]).mean(0))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(folder, delay=3)
    return folder


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    parameters = summary["parameters"]
    assert summary["tokens"] == STEPS * 3 * 2 * 32 and summary["method"] == "noloco" and summary["replicas"] == 3
    assert summary["ddp_bytes"] == 4 * parameters * 2 * 2 * STEPS
    # Rounds at steps 5, 10, 15 and 20, one pair each; and nine facts, of 4 bytes, to two others before the first.
    assert summary["bytes_sent"] == 4 * 2 * 4 * parameters + 3 * 2 * 36
    assert summary["validation_loss"] == pytest.approx(sum(summary["validation_loss_per_replica"]) / 3)
    assert 2 < summary["validation_loss_averaged"] < math.log(256)
    weights = final_weights(undisturbed)
    flat = torch.stack([torch.cat([w.flatten() for w in replica.values()]) for replica in weights]).double()
    assert summary["weight_spread"] == pytest.approx(float((flat - flat.mean(0)).square().mean().sqrt()), rel=1e-4)
    assert summary["sample"]
    averaged = checkpoint.read(checkpoint.average_of(undisturbed))["model"]
    assert_means(averaged, weights)
    # Four steps a line of loss, the virtual clock, and only the newest checkpoints kept.
    steps = events(undisturbed, 0, "step")
    assert [event["step"] for event in steps] == [4, 8, 12, 16, 20, 24]
    assert events(undisturbed, 0, "end")[0]["reason"] == "finished"
    assert summary["seconds"] == pytest.approx(STEPS * 0.1, abs=0.5)
    assert sorted(p.name for p in (undisturbed / "checkpoints").iterdir()) == [
        "averaged.pt",
        "step-000018",
        "step-000024",
    ]


@pytest.mark.slow
def test_the_same_settings_give_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    run(tmp_path / "again", delay=3)
    assert same_weights(undisturbed, tmp_path / "again", STEPS, range(3))
    for replica in range(3):
        name = f"events/replica-{replica}.jsonl"
        assert (undisturbed / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


KILLER = """
import os, signal, sys, torch
from pathlib import Path
from farflung.settings import read_settings
from farflung.training import checkpoint, launch, trainer

at, folder, resume = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "resume"
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
torch.set_num_threads(1)
if at.startswith("step"):
    original = trainer.Trainer._train_step
    def step(self, outer):
        original(self, outer)
        if self.step == int(at[4:]) and self.process == 1: die()
    trainer.Trainer._train_step = step
elif at.startswith("write"):
    writes = 0
    original = torch.save
    def save(state, file):
        global writes
        writes += 1
        if writes == int(at[5:]):
            file.write(b"half a file"); file.flush(); die()
        original(state, file)
    torch.save = save
elif at.startswith("rename"):
    renames = 0
    original = Path.rename
    def rename(self, target):
        global renames
        renames += 1
        original(self, target)
        if renames == int(at[6:]): die()
    Path.rename = rename
config = read_settings(folder / "config.toml")
launch.run_simulated(config, folder, resume)
"""


def resumes(folder: Path) -> bool:
    """Whether a run can go on; one that has no whole checkpoint yet begins anew."""
    if checkpoint.whole_steps(folder):
        return True
    clear(folder)
    return False


def killed(folder: Path, at: str, resume: bool) -> None:
    process = Python("-c", KILLER, at, folder, "resume" if resume else "start")
    assert process.wait(patience(60)) == -signal.SIGKILL, process.err.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("instants", [["step3"], ["step13", "write2"], ["write2", "rename5"], ["rename8", "step23"]])
def test_killed_at_any_instant_it_goes_on_bit_for_bit(undisturbed: Path, tmp_path: Path, instants: list[str]) -> None:
    """Before the first checkpoint, between two, in the middle of a round, while a file is written or just renamed."""
    folder = tmp_path / "killed"
    launch.prepare(Settings.of(out=str(folder), **SMALL, delay=3), folder, False)
    for instant in instants:
        killed(folder, instant, resumes(folder))
    config = Settings.of(out=str(folder), **SMALL, delay=3)
    launch.run_simulated(config, folder, resumes(folder))
    assert same_weights(undisturbed, folder, STEPS, range(3))
    one, other = (json.loads((f / "summary.json").read_text()) for f in (undisturbed, folder))
    for key in ("validation_loss", "validation_loss_averaged", "bytes_sent", "rounds", "weight_spread", "sample"):
        assert one[key] == other[key], key
    for replica in range(3):
        steps = [event["step"] for event in events(folder, replica, "step")]
        assert steps == [4, 8, 12, 16, 20, 24], "no line twice, none lost"


@pytest.mark.slow
def test_a_stop_leaves_a_whole_checkpoint_of_one_step(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    launch.prepare(Settings.of(out=str(folder), **SMALL, delay=3), folder, False)
    script = KILLER.replace("signal.SIGKILL", "signal.SIGTERM").replace(
        "launch.run_simulated(config, folder, resume)",
        "from farflung.training.stopping import StoppedError\n"
        "try: launch.run_simulated(config, folder, resume)\n"
        "except StoppedError as stopped: print(stopped); sys.exit(7)",
    )
    process = Python("-c", script, "step16", folder, "start")
    said, complaint = process.communicate(patience(60))
    assert process.returncode == 7, complaint
    (newest, *_) = checkpoint.whole_steps(folder)
    assert 16 <= newest <= 18 and f"stopped after step {newest}" in said
    assert not (folder / "summary.json").exists()
    launch.run_simulated(Settings.of(out=str(folder), **SMALL, delay=3), folder, True)
    assert same_weights(undisturbed, folder, STEPS, range(3))


@pytest.mark.slow
def test_a_finished_run_resumes_to_the_same_end(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = run(folder)
    after = run(folder, resume=True)
    assert before == after


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ddp", "local", "diloco"])
def test_other_methods_run_too(method: str, tmp_path: Path) -> None:
    summary = run(tmp_path / method, method=method, every=None if method in ("ddp", "local") else 5)
    if method == "ddp":
        assert summary["bytes_sent"] == pytest.approx(summary["ddp_bytes"], rel=1e-3)
    if method == "local":
        assert summary["bytes_sent"] == 0 and summary["rounds"] == 0
    assert (summary["weight_spread"] < 1e-6) == (method == "ddp")


@pytest.mark.slow
def test_the_summary_of_a_partition_is_of_its_largest_side_and_names_who_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lonely side ends first, since it waits for nobody; what is compared with ddp is of the same replicas."""
    world = tmp_path / "cut.toml"
    world.write_text("step_ms = 1000\n[[cuts]]\nreplicas = [0]\nfrom_s = 8\nuntil_s = 100000\n")
    folder = tmp_path / "run"
    summary = run(folder, replicas=4, method="diloco", conditions=str(world))
    assert summary["replicas"] == 4 and summary["missing"] == [0]
    last = [events(folder, replica, "step")[-1] for replica in (1, 2, 3)]
    losses = [events(folder, replica, "evaluation")[-1]["score"] for replica in (1, 2, 3)]
    assert summary["validation_loss_per_replica"] == losses
    assert summary["bytes_sent"] == sum(event["bytes_sent"] for event in last)
    assert summary["tokens"] == sum(event["tokens"] for event in last)
    assert summary["ddp_bytes"] == 3 * (4 * summary["parameters"] * 2 * 3 * STEPS) / 4
    averaged = checkpoint.read(checkpoint.average_of(folder))["model"]
    weights = final_weights(folder, 4)[1:]
    assert_means(averaged, weights)
    tell_result(folder)
    words = "without replica 0, which the others could not reach at the end"
    assert words in capsys.readouterr().out and words in (folder / "report.html").read_text()


@pytest.mark.slow
def test_who_ends_alone_while_it_is_cut_off_leaves_the_summary_to_the_others(tmp_path: Path) -> None:
    """Replica 2 ends at 2.4 s; the others, whose links are slow, when the cut has healed."""
    world = tmp_path / "cut.toml"
    world.write_text("step_ms = 100\nbandwidth_mbps = 5\n[[cuts]]\nreplicas = [2]\nfrom_s = 0.45\nuntil_s = 3\n")
    summary = run(tmp_path / "run", method="diloco", conditions=str(world))
    assert summary["missing"] == [2] and 3 < summary["seconds"] < 60
    assert_means(checkpoint.read(checkpoint.average_of(tmp_path / "run"))["model"], final_weights(tmp_path / "run", 2))


@pytest.mark.slow
def test_who_comes_when_the_others_have_ended_only_says_so(tmp_path: Path) -> None:
    """Replica 1 is slow, and cut off until the others have gone."""
    world = tmp_path / "slow.toml"
    cut = "[[cuts]]\nreplicas = [1]\nfrom_s = 0\nuntil_s = 30\n"
    world.write_text(f"step_ms = 1000\nspeed_sigma = 0.5\nseed = 13\n{cut}")
    summary = run(tmp_path / "run", method="diloco", conditions=str(world))
    assert summary["missing"] == [1]
    assert "ended without the others" in events(tmp_path / "run", 1, "warning")[-1]["message"]
    assert checkpoint.whole_steps(tmp_path / "run")[0] == STEPS


@pytest.mark.slow
def test_an_export_loads_with_transformers(undisturbed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    origin = export(undisturbed, tmp_path / "model")
    assert "averaged at the end" in origin
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    averaged = checkpoint.read(checkpoint.average_of(undisturbed))["model"]
    assert same({name: loaded[name] for name in averaged}, averaged)
    with pytest.raises(UserError, match="exists already"):
        export(undisturbed, tmp_path / "model")
    with pytest.raises(UserError, match="holds no run"):
        export(tmp_path, tmp_path / "other")


@pytest.mark.slow
def test_an_export_to_a_full_disk_is_told_in_a_line_and_leaves_nothing(undisturbed: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"^cannot write to \S+model: .*too large.*; give another folder, or make"):
            export(undisturbed, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_an_unfinished_run_exports_its_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder)
    checkpoint.average_of(folder).unlink()
    assert "mean of 3 replicas' checkpoints at step 24" in export(folder, tmp_path / "model")


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_refused(undisturbed: Path) -> None:
    with pytest.raises(UserError, match="already holds a run; choose another folder with --out"):
        run(undisturbed)
    with pytest.raises(UserError, match="already holds a run"):
        EventLog(undisturbed, 0, "replica-0", time.monotonic)


def test_a_folder_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0, "replica-0", time.monotonic)
    with pytest.raises(UserError, match="being trained by another process"):
        EventLog(tmp_path, 0, "replica-0", time.monotonic, keep=0)
    log.close()
    EventLog(tmp_path, 0, "replica-0", time.monotonic, keep=0).close()


@pytest.mark.slow
def test_nan_loss_is_survived_once_and_stops_a_run_that_stays_sick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = models.sequence_loss, 0

    def sick_at(first: int, last: int) -> Any:
        def loss(model: Any, *batch: Any) -> torch.Tensor:
            nonlocal calls
            calls += model.training
            value = original(model, *batch)
            return value * float("nan") if model.training and first <= calls <= last else value

        return loss

    monkeypatch.setattr(models, "sequence_loss", sick_at(21, 21))
    summary = run(tmp_path / "once")
    assert summary["validation_loss"] < math.log(256)
    messages = [event["message"] for replica in range(3) for event in events(tmp_path / "once", replica, "warning")]
    assert len(messages) == 2 and "loss is nan at step" in messages[0] and "no progress offered" in messages[1]
    outcomes = [event["outcome"] for replica in range(3) for event in events(tmp_path / "once", replica, "round")]
    assert outcomes.count("no progress offered") == 1

    calls = 0
    monkeypatch.setattr(models, "sequence_loss", sick_at(10, 10**9))
    with pytest.raises(DivergedError, match="3 rounds in a row; the last time: loss is nan"):
        run(tmp_path / "sick")


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    config = Settings.of(lr=1.0, warmup=10, steps=110)
    rates = [lr_scale(config.inner, step, config.run.steps) for step in range(110)]
    assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)]) and rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and 0.1 < rates[-1] < 0.101
    assert max(rates) == 1.0


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, "replica-0", {"x": torch.ones(3)})
    with pytest.raises(Exception, match="pickle"):
        checkpoint.save(tmp_path, 5, "replica-0", {"x": lambda: None})
    assert torch.equal(saved(tmp_path, 5, 0)["x"], torch.ones(3))


def test_pruning_removes_a_replicas_own_files(tmp_path: Path) -> None:
    for replica in (0, 1):
        (tmp_path / "events").mkdir(exist_ok=True)
        (tmp_path / "events" / f"replica-{replica}.jsonl").touch()
        for step in (10, 20, 30):
            checkpoint.save(tmp_path, step, f"replica-{replica}", {})
    checkpoint.save(tmp_path, 40, "replica-0", {})
    checkpoint.prune(tmp_path, 0, before=20)
    assert checkpoint.steps_of(tmp_path, 0) == {20, 30, 40} and checkpoint.steps_of(tmp_path, 1) == {10, 20, 30}
    assert checkpoint.whole_steps(tmp_path) == [30, 20]
    assert (tmp_path / "checkpoints" / "step-000010").is_dir()
