"""`--memory`: a run that fits into what it is given, with the losses of one that keeps everything."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from processes import HERE, SMALL, run_here, run_together, same, same_weights, saved
from torch import nn
from transformers import LlamaConfig

from farflung.errors import UserError
from farflung.events import MemoryEvent, StepEvent
from farflung.memory.far import check_room
from farflung.memory.fitted import Record, is_out_of_memory
from farflung.memory.measure import Held, bytes_of
from farflung.memory.plan import NOTHING
from farflung.memory.room import cap_of, total
from farflung.networks import SimulatedNetwork
from farflung.pipeline.island import WholeIsland
from farflung.report.memory import memory_line, memory_table
from farflung.report.read import read_run
from farflung.settings import Settings
from farflung.training import checkpoint
from farflung.training.finish import finish, write_results
from farflung.training.fitting import layers_of
from farflung.training.island import coordination
from farflung.training.trainer import Trainer

CPU = torch.device("cpu")
ALONE = [*SMALL, "--method", "local", "--replicas", "1", "--network", "torch"]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["--memory", "16 apples"], "memory is '16 apples'; give an amount such as 16GB"),
        (["--memory", "0GB"], "memory is '0GB'; give an amount"),
        (["--memory", "101%"], "memory is '101%'; give an amount such as 16GB, a share of the device's up to 100%"),
        (["--memory", f"{'9' * 400}GB"], "give an amount"),
        (["--memory", "16 apples", "--dry-run"], "memory is '16 apples'; give an amount"),
        (["--far-folder", "far"], "add --memory auto, or leave it out"),
        (["--memory", "auto", "--recompute"], "memory is 'auto', which recompute cannot be planned with"),
        (
            ["--memory", "auto", "--model", "tiny", "--stages", "2", "--pipeline-schedule", "zero-bubble"],
            "which --pipeline-schedule zero-bubble cannot be planned with",
        ),
        (["--memory", "auto", "--network", "simulated"], "simulated replicas share one; leave out --memory"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(
    settings: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(monkeypatch, tmp_path, "train", *ALONE, *settings, "--out", "run") != 0
    assert told in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_amounts_of_memory() -> None:
    assert cap_of("16GB", CPU, 1) == cap_of("16 gb", CPU, 4) == 16 * 10**9
    assert cap_of("1.5MB", CPU, 1) == 1_500_000
    assert cap_of("16GiB", CPU, 1) == cap_of("16 gib", CPU, 1) == 16 << 30
    assert cap_of("512MiB", CPU, 1) == 512 << 20
    assert cap_of("40%", CPU, 1) == int(0.4 * total(CPU))
    assert 0 < cap_of("auto", CPU, 4) < cap_of("auto", CPU, 1) < total(CPU)


def test_a_far_folder_without_room_is_told_in_a_line(tmp_path: Path) -> None:
    check_room(tmp_path / "far", 1)
    with pytest.raises(UserError, match=r"far has .* GB of room, and 1e\+09 GB are to lie there; make room, or name"):
        check_room(tmp_path / "far", 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file.*--far-folder"):
        check_room(tmp_path / "file", 1)


def test_errors_of_too_little_memory_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2, 3) @ torch.empty(2, 3)
    assert not is_out_of_memory(caught.value)


def test_a_model_whose_layers_cannot_be_told_apart_is_told_in_a_line() -> None:
    settings = Settings.of(model="micro")
    language = settings.made_workload()
    model = language.build(0)

    def island(workload: Any) -> WholeIsland:
        return WholeIsland(settings.island, workload, model, cast(Any, None), cast(Any, None), 0, CPU)

    assert len(layers_of(island(language))) == model.config.num_hidden_layers
    again = SimpleNamespace(layers=lambda model: 2 * list(language.layers(model)))  # each called twice
    assert layers_of(island(again)) == layers_of(island(language))
    model.model.beside = nn.Linear(2, 2)  # before the layers, or after them?
    for workload in (language, SimpleNamespace()):
        with pytest.raises(UserError, match=r"layers of Llama.* cannot be told apart .*; leave out --memory"):
            layers_of(island(workload))


def test_a_file_that_holds_no_plan_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "replica-0.json"
    assert Record.read(path) is None
    for text in ("{", "[]", '{"plan": {}}', '{"memory": 1}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"replica-0\.json") as caught:
            Record.read(path)
        assert "\n" not in str(caught.value)


def test_a_plan_of_more_layers_than_were_measured_is_none(tmp_path: Path) -> None:
    path, none = tmp_path / "replica-0.json", {"layers": [], "before": vars(NOTHING), "head": vars(NOTHING)}
    profile = none | {"out_bytes_s": 1.0, "in_bytes_s": 1.0, "fixed_bytes": 0}
    plan = {"layers": [{}], "prefetch_bytes": 0, "peak_bytes": 0, "seconds": 0.0}
    known = {"memory": "1GB", "cap_bytes": 1, "passes": 1, "far": ""}
    path.write_text(json.dumps(known | {"plan": plan, "profile": profile}))
    with pytest.raises(UserError, match=r"json holds no plan .* of 1 layers, and 0 were measured; remove it, and a"):
        Record.read(path)


def trainer_of(folder: Path, resume_step: int | None = None, **settings: Any) -> Trainer:
    """Of a replica in this process, alone, with all of the machine's memory."""
    usual: dict[str, Any] = {"model": "micro", "sequence_length": 16, "max_tokens": 50_000, "eval_sequences": 2}
    usual |= {"method": "local", "network": "torch", "replicas": 1, "memory": "100%", "inner": "adamw"}
    config = Settings.of(**(usual | settings))
    return Trainer(config, SimulatedNetwork.alone(), folder, coordination(None, config.figure), CPU, resume_step)


def test_a_plan_of_other_parts_of_a_step_or_of_another_device_is_made_anew(tmp_path: Path) -> None:
    """Twice the samples at once save twice the bytes, so that a plan of fewer would not fit."""
    plan = tmp_path / "memory/replica-0.json"

    def kept(steps: int, microbatches: int) -> dict[str, Any]:
        resumed = steps - 1 or None
        trainer = trainer_of(tmp_path, resumed, steps=steps, batch_size=4, microbatches=microbatches)
        with trainer.stop.listening():
            trainer.train()
        trainer.log.events.close()
        return cast(dict[str, Any], json.loads(plan.read_text()))

    first = kept(1, 4)
    assert (first["passes"], first["device"]) == (4, "cpu")
    second = kept(2, 1)
    saved_bytes = [one["profile"]["layers"][0]["saved_bytes"] for one in (first, second)]
    assert second["passes"] == 1 and saved_bytes[1] > 3 * saved_bytes[0]
    plan.write_text(json.dumps(second | {"device": "cuda", "cap_bytes": 12345}))
    third = kept(3, 1)
    assert third["device"] == "cpu" and third["cap_bytes"] > 12345
    halves = {part: third[part] | {"layers": third[part]["layers"][:1]} for part in ("plan", "profile")}
    plan.write_text(json.dumps(third | halves))  # of a stage, whose place another one has taken
    fourth = kept(4, 1)
    assert len(fourth["plan"]["layers"]) == 2
    more = fourth["profile"] | {"in_flight": 3}
    plan.write_text(json.dumps(fourth | {"profile": more, "cap_bytes": 12345}))
    assert kept(5, 1)["profile"]["in_flight"] == 1


def test_a_run_ends_without_a_copy_of_its_model(tmp_path: Path) -> None:
    """From its last step on: evaluations, a checkpoint, the summary and the averaged weights."""
    trainer = trainer_of(tmp_path, steps=1, batch_size=2, tail_average=0)
    held = Held()
    with ExitStack() as last, trainer.stop.listening():
        trainer.train(at_the_end=lambda _: last.enter_context(held))  # type: ignore[no-untyped-call]
        summary = finish(trainer, lambda ended: ended(trainer.network))
        write_results(trainer, summary, tells=True)
    trainer.log.events.close()
    parameters = list(trainer.model.parameters())
    assert summary["parameters"] == sum(parameter.numel() for parameter in parameters)
    assert 0 < held.most < bytes_of(parameters) / 2
    kept = (saved(tmp_path, 1, 0)["model"], checkpoint.read(checkpoint.average_of(tmp_path))["model"])
    assert all(same(weights, trainer.model.state_dict()) for weights in kept)


def llama(folder: Path, layers: int) -> str:
    """A model of some layers of a megabyte each."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 640}
    LlamaConfig(**sizes, num_hidden_layers=layers).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["moments-far", "optimizer-far", "weights-far"])
def test_a_run_goes_on_in_the_memory_that_it_began_in(state: str, tmp_path: Path) -> None:
    """What is far goes from the checkpoint to where it lies, and what follows is bit for bit what did without."""
    usual: dict[str, Any] = {"model": llama(tmp_path / "model", 8), "steps": 3, "batch_size": 2, "tail_average": 0}
    usual |= {"checkpoint_every": 1, "keep_checkpoints": 3, "warmup": 1, "far_folder": str(tmp_path / "far")}

    def most(folder: Path, resume_step: int | None = None) -> int:
        """The most bytes that tensors take at a time."""
        with Held() as held:  # type: ignore[no-untyped-call]
            trainer = trainer_of(folder, resume_step, **usual)
            with trainer.stop.listening():
                trainer.train()
        trainer.log.events.close()
        return held.most

    near, far = tmp_path / "near", tmp_path / "run"
    most(near)
    record = json.loads((near / "memory/replica-0.json").read_text())
    record["plan"]["layers"] = [layer | {"state": state} for layer in record["plan"]["layers"]]
    (far / "memory").mkdir(parents=True)
    (far / "memory/replica-0.json").write_text(json.dumps(record))
    began = most(far)
    went_on = most(far, resume_step=1)
    assert went_on < 1.1 * began
    states = [saved(folder, 3, 0) for folder in (near, far)]
    assert same(*(one["model"] for one in states))
    for number, moments in states[0]["optimizer"]["state"].items():
        assert same(moments, states[1]["optimizer"]["state"][number])


def test_a_step_without_a_finite_loss_changes_nothing_far(tmp_path: Path) -> None:
    """The gradients that have left in its backward pass are forgotten, as those that are near."""

    def trained(folder: Path) -> Any:
        trainer = trainer_of(folder, steps=2, batch_size=2, tail_average=0, far_folder=str(tmp_path / "far"))
        island = cast(Any, trainer.island)
        loss = island.loss
        island.loss = lambda batch: loss(batch) * (math.nan if trainer.progress.trained == 1 else 1)
        with trainer.stop.listening():
            trainer.train()
        trainer.log.events.close()
        return trainer.model.state_dict()

    near, far = tmp_path / "near", tmp_path / "run"
    wanted = trained(near)
    record = json.loads((near / "memory/replica-0.json").read_text())
    record["plan"]["layers"] = [layer | {"state": "optimizer-far"} for layer in record["plan"]["layers"]]
    (far / "memory").mkdir(parents=True)
    (far / "memory/replica-0.json").write_text(json.dumps(record))
    assert same(trained(far), wanted)


def test_moments_that_others_have_made_go_far_before_the_first_step_of_ones_own(tmp_path: Path) -> None:
    """A newcomer has them, and has trained no step itself."""

    def computes(name: str) -> Trainer:
        far = str(tmp_path / "far")
        return trainer_of(tmp_path / name, steps=1, batch_size=2, tail_average=0, inner="muon", far_folder=far)

    other = computes("other")
    with other.stop.listening():
        other.train()
    other.log.events.close()
    record = json.loads((tmp_path / "other/memory/replica-0.json").read_text())
    record["plan"]["layers"] = [layer | {"state": "optimizer-far"} for layer in record["plan"]["layers"]]
    (tmp_path / "new/memory").mkdir(parents=True)
    (tmp_path / "new/memory/replica-0.json").write_text(json.dumps(record))
    new = computes("new")
    new.computing.take(other.optimizer.state_dict(), 0)
    assert new.computing.far and new.computing.far(), "the plan is carried out, so that what is far is not near first"
    new.log.events.close()


def train(folder: Path, *arguments: str) -> None:
    run_together(1, "-m", "farflung", "train", *arguments, "--out", folder)


def losses(folder: Path) -> list[float | None]:
    return [event.loss for event in read_run(folder).all_of(StepEvent)]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_with_little_memory_is_bit_for_bit_one_with_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Too little is told with how much is enough. A run that goes on follows the plan that it has kept."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    usual = [*ALONE, "--inner", "adamw", "--steps", "12", "--sequence-length", "128", "--batch-size", "64"]
    usual += ["--compile"] * compiled
    train(tmp_path / "much", *usual)
    far, little = ("--far-folder", str(tmp_path / "far")), tmp_path / "little"
    with pytest.raises(AssertionError, match=r"cannot be made with 0\.001 GB of memory; give at") as caught:
        train(tmp_path / "least", *usual, *far, "--memory", "1MB")
    found = re.search(r"give at least ([\d.]+) GB", str(caught.value))
    assert found
    train(little, *usual, *far, "--memory", f"{found[1]}GB")
    assert same_weights(little, tmp_path / "much", 12, [0])
    plan = little / "memory" / "replica-0.json"
    kept = json.loads(plan.read_text())
    assert {layer["mode"] for layer in kept["plan"]["layers"]} != {"keep"}
    assert set(kept["measured"]) == {"peak_bytes", "seconds"}
    told = read_run(little).all_of(MemoryEvent)
    assert [event.measured_bytes is None for event in told] == [True, False]
    plan.write_text(json.dumps(kept | {"plan": kept["plan"] | {"prefetch_bytes": 12345}}))
    for path in little.glob("checkpoints/*"):
        shutil.rmtree(path) if path.name > "step-000010" and path.is_dir() else None
    for name in ("summary.json", "checkpoints/averaged.pt"):
        (little / name).unlink()
    run_together(1, "-m", "farflung", "train", "--resume", little)
    assert json.loads(plan.read_text())["plan"]["prefetch_bytes"] == 12345
    assert same_weights(little, tmp_path / "much", 12, [0])
    run = read_run(little)
    assert told[0].plan in memory_line(told[0]) and told[0].plan in memory_table(run)
    assert json.loads((little / "summary.json").read_text())["memory"][0]["plan"] == told[0].plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "settings"),
    [
        ("optimizer-far,weights-far", ["--clip", "0.1"]),
        ("optimizer-far,near", ["--clip", "0", "--codec", "int8"]),
        ("optimizer-far,moments-far,weights-far", ["--clip", "0.1", "--microbatches", "2"]),
    ],
)
def test_gradients_that_are_averaged_may_be_far(states: str, settings: list[str], tmp_path: Path) -> None:
    """Bit for bit as near ones; each replica has them where its own plan says."""
    replicas = states.count(",") + 1
    usual = ["train", *SMALL, "--method", "ddp", "--replicas", str(replicas), "--network", "torch", *settings]
    usual += ["--inner", "adamw", "--steps", "4"]
    run_together(replicas, "-m", "farflung", *usual, "--out", tmp_path / "near")
    planned = ["--memory", "100%", "--far-folder", str(tmp_path / "far"), "--out", str(tmp_path / "run")]
    run_together(replicas, HERE / "far_states.py", states, *usual, *planned)
    assert same_weights(tmp_path / "near", tmp_path / "run", 4, range(replicas))
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "run" / "memory").iterdir())]
    assert [{layer["state"] for layer in one["plan"]["layers"]} for one in kept] == [{s} for s in states.split(",")]


LATE = """
import os, sys, time
from farflung import cli
from farflung.training.trainer import Trainer
original = Trainer._train_step
def step(self, outer):
    time.sleep(0.5 * int(os.environ["RANK"]))
    original(self, outer)
Trainer._train_step = step
cli.main()
"""


@pytest.mark.slow
def test_what_a_step_waits_for_others_is_not_held_against_its_plan(tmp_path: Path) -> None:
    usual = ["train", *SMALL, "--method", "ddp", "--replicas", "2", "--network", "torch", "--steps", "13"]
    run_together(2, "-c", LATE, *usual, "--memory", "100%", "--out", tmp_path)
    run = read_run(tmp_path)
    measured = [[event.measured_seconds for event in run.of(replica, MemoryEvent)][-1] for replica in (0, 1)]
    assert measured[0] and measured[1] and measured[0] < 0.5 < measured[1], "the second has slept, not waited"


@pytest.mark.slow
def test_stages_with_little_memory_are_bit_for_bit_those_with_much(tmp_path: Path) -> None:
    """Each plans for itself, with the microbatches in flight in it; what is told to be enough is so for each."""
    usual = [*SMALL, "--method", "local", "--replicas", "1", "--stages", "2", "--inner", "adamw", "--steps", "2"]
    usual += ["--sequence-length", "128", "--batch-size", "192", "--microbatches", "3", "--network", "torch"]
    far = ("--far-folder", str(tmp_path / "far"))
    run_together(2, "-m", "farflung", "train", *usual, "--log-every", "1", "--out", tmp_path / "much")
    with pytest.raises(AssertionError, match=r"give at least") as caught:
        run_together(2, "-m", "farflung", "train", *usual, *far, "--memory", "1MB", "--out", tmp_path / "least")
    (least,) = re.findall(r"give at least ([\d.]+) GB", str(caught.value))
    little = ("--memory", f"{least}GB", "--log-every", "1", "--out", tmp_path / "little")
    run_together(2, "-m", "farflung", "train", *usual, *far, *little)
    kept = [json.loads(path.read_text()) for path in sorted((tmp_path / "little" / "memory").iterdir())]
    assert [record["profile"]["in_flight"] for record in kept] == [2, 1]
    assert [len(record["plan"]["layers"]) for record in kept] == [1, 1]
    assert {layer["mode"] for record in kept for layer in record["plan"]["layers"]} != {"keep"}
    assert losses(tmp_path / "little") == losses(tmp_path / "much") != []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_where_memory_is_limited_it_trains_with_the_same_losses(tmp_path: Path) -> None:
    """Without a plan, the process dies of it."""
    usual = ["train", *ALONE, "--model", llama(tmp_path / "deep", 10), "--steps", "2", "--log-every", "1"]
    usual += ["--sequence-length", "128", "--batch-size", "64", "--inner", "adamw"]
    run_together(1, HERE / "limited.py", 0, *usual, "--out", tmp_path / "kept")
    with pytest.raises(AssertionError, match="allocate memory"):
        run_together(1, HERE / "limited.py", 700, *usual, "--out", tmp_path / "dies")
    run_together(1, HERE / "limited.py", 700, *usual, "--memory", "auto", "--out", tmp_path / "fits")
    assert len(losses(tmp_path / "kept")) == 2
    assert losses(tmp_path / "fits") == losses(tmp_path / "kept")
    assert same_weights(tmp_path / "fits", tmp_path / "kept", 2, [0])
    (told,) = json.loads((tmp_path / "fits" / "summary.json").read_text())["memory"]
    assert "compute it again" in told["plan"]
