"""A replica at full speed: compiled, in bfloat16, batches and checkpoints in the background; resuming is exact."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience, until
from processes import SMALL, free_port, run_here, same, saved
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from warm import Python

from farflung.errors import UserError
from farflung.networks import SimulatedNetwork
from farflung.pipeline.ahead import Ahead
from farflung.pipeline.assemble import assemble
from farflung.pipeline.compiling import telling_of_compilers
from farflung.planner.architecture import architecture_of
from farflung.settings import Settings
from farflung.training import checkpoint, launch
from farflung.training.beginning import how_to_go_on
from farflung.training.measures import peak_tflops, squares_apart
from farflung.training.saving import Saving, copied
from farflung.workloads.base import Span
from farflung.workloads.models import sequence_loss

STEPS = 12
ALONE = [*SMALL, "--steps", str(STEPS), "--method", "local"]

KILLED = """
import os, signal, sys
from farflung import cli
from farflung.training.trainer import Trainer
original = Trainer._train_step
def step(self, session):
    original(self, session)
    if self.step == 8:
        self._end_saving(wait=True)
        os.kill(os.getpid(), signal.SIGKILL)
Trainer._train_step = step
sys.argv = ["farflung", *sys.argv[1:]]
cli.main()
"""


def alone() -> dict[str, Any]:
    """What torchrun would tell a process that is the only one."""
    here = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return {name: str(value) for name, value in here.items()} | {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled is kept for these tests alone: a test that is killed may leave half of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


def killed_and_resumed_as_undisturbed(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, Any]:
    """The last checkpoint of a run of one process, which one that was killed and resumed has bit for bit."""
    for name, value in alone().items():
        monkeypatch.setenv(name, value)
    assert run_here(monkeypatch, folder, "train", *flags, "--out", "whole") == 0
    process = Python("-c", KILLED, "train", *flags, "--out", folder / "run", **alone())
    assert process.wait(patience(100)) == -signal.SIGKILL, process.err.read_text()
    assert checkpoint.whole_steps(folder / "run") == [5]
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert run_here(monkeypatch, folder, "train", "--resume", "run") == 0
    whole, resumed = (saved(folder / name, STEPS, 0) for name in ("whole", "run"))
    assert same(whole["model"], resumed["model"])
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        [],
        ["--precision", "bfloat16", "--inner", "adamw"],
        ["--compile", "--precision", "bfloat16", "--microbatches", "2"],
    ],
)
def test_killed_and_resumed_is_as_undisturbed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    whole = killed_and_resumed_as_undisturbed(tmp_path, monkeypatch, *ALONE, *mode)
    assert {tensor.dtype for tensor in whole["model"].values()} == {torch.float32}


def gradients(watch: Any = None, **settings: Any) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradients of a first step, which is watched."""
    chosen = Settings.of(network="simulated", replicas=1, **{"model": "micro", "sequence_length": 32, **settings})
    workload, network = chosen.made_workload(), SimulatedNetwork.alone()
    island, _ = assemble(chosen.island, workload, network, chosen.mesh(), 0, chosen.network, torch.device("cpu"))
    with watch or nullcontext():
        loss, fault = island.gradients(0)
    assert not fault
    return loss, [parameter.grad for parameter in island.model.parameters() if parameter.grad is not None]


@pytest.mark.slow
def test_a_compiled_model_computes_what_it_computes_eagerly_and_its_layers_share_one_graph() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    (loss, eager), (compiled_loss, compiled) = gradients(), gradients(compile=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled_loss == pytest.approx(loss, rel=1e-5) and len(eager) == len(compiled)
    for one, other in zip(eager, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_keeps_gradients_whole() -> None:
    """Matrices are multiplied in bfloat16; the loss is nearly that of float32, and gradients are float32."""
    products = set[torch.dtype]()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                products.update(one.dtype for one in args if isinstance(one, torch.Tensor))
            return func(*args, **(kwargs or {}))

    (exact, _), (loss, found) = gradients(), gradients(Watched(), precision="bfloat16")  # type: ignore[no-untyped-call]
    assert products == {torch.bfloat16}
    assert loss == pytest.approx(exact, rel=1e-2) and loss != exact
    assert {gradient.dtype for gradient in found} == {torch.float32}


def test_attention_of_presets_is_torchs_own() -> None:
    called = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                called.append((kwargs or {}).get("attn_mask"))
            return func(*args, **(kwargs or {}))

    gradients(Watched())
    assert called == [None, None]  # one a layer; a mask of its own would keep it from its fast forms


def test_a_pass_reads_no_number_from_its_device_but_where_documents_begin_anew() -> None:
    read = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                read.append(func)
            return func(*args, **(kwargs or {}))

    workload = Settings.of(network="simulated", model="micro", sequence_length=32).made_workload()
    model = workload.build(0)
    tokens, positions = torch.arange(64).view(2, 32), (torch.arange(32) % 8).expand(2, 32)
    with Watched():  # type: ignore[no-untyped-call]
        whole = sequence_loss(model, tokens)
    assert not read
    with Watched():  # type: ignore[no-untyped-call]
        packed = sequence_loss(model, tokens, positions=positions)
    assert read and whole.item() != packed.item()
    assert model(input_ids=tokens, labels=tokens, position_ids=positions, use_cache=False).loss.item() == packed.item()


def test_batches_made_ahead_are_those_of_their_steps_and_come_from_one_thread() -> None:
    made: list[tuple[int, str]] = []

    def make(step: int) -> int:
        made.append((step, threading.current_thread().name))
        return step * step

    ahead = Ahead(make)
    assert [ahead.at(step) for step in (3, 4, 5, 9, 10)] == [9, 16, 25, 81, 100]
    until(lambda: len(made) == 9)
    assert [step for step, _ in made] == [*range(3, 8), *range(9, 13)]
    assert {name for _, name in made} == {"batches_0"}
    ahead.close()
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_an_error_in_the_thread_is_that_of_the_step_that_needs_the_batch() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise UserError("the data has gone; bring it back")
        return step

    ahead = Ahead(make)
    assert [ahead.at(step) for step in (0, 1)] == [0, 1]
    with pytest.raises(UserError, match="the data has gone; bring it back"):
        ahead.at(2)
    ahead.close()


def state(value: float) -> Any:
    return {"model": {"weight": torch.full((1000,), value)}, "shard": 0, "buffers": []}


def test_what_is_written_is_what_was_there_and_not_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, original = threading.Event(), torch.save

    def save(*arguments: Any) -> None:
        assert written.wait(patience(10))
        original(*arguments)

    monkeypatch.setattr(torch, "save", save)
    saving, now = Saving(tmp_path, "replica-0", lambda: None, background=True), state(1.0)
    saving.begin(5, now, None)
    now["model"]["weight"].fill_(2.0)
    assert saving.ended(wait=False) is None
    written.set()
    told = saving.ended(wait=True)
    assert told and told.step == 5 and not told.fault and saving.ended(wait=True) is None
    saving.close()
    assert torch.equal(saved(tmp_path, 5, 0)["model"]["weight"], torch.full((1000,), 1.0))


def test_a_run_folder_that_was_moved_is_told_and_not_begun_anew(tmp_path: Path) -> None:
    """Checkpoints had gone into a new folder, without the settings that --resume needs, and without a word."""
    folder = tmp_path / "run"
    folder.mkdir()
    saving = Saving(folder, "replica-0", lambda: None, background=False)
    folder.rename(tmp_path / "moved")
    saving.begin(1, state(1.0), None)
    ended = saving.ended(wait=True)
    assert ended and ended.fault == "the run folder was moved or removed"
    assert not folder.exists()
    assert how_to_go_on(folder).startswith(f"{folder} is not there; where it was moved, go on from its new place")
    (tmp_path / "moved").rename(folder)
    saving.begin(2, state(1.0), None)
    ended = saving.ended(wait=True)
    assert ended and not ended.fault


def test_a_copy_keeps_what_shares_memory_together() -> None:
    one = torch.ones(4)
    made = copied({"a": one, "b": [one.detach(), (one[:2], 3)]}, {})
    assert made["a"] is made["b"][0] and made["b"][1][1] == 3
    assert made["b"][1][0].data_ptr() != made["a"].data_ptr() != one.data_ptr()


WRITER = """
import os, signal, sys, torch
from pathlib import Path
from farflung.training.saving import Saving
saving = Saving(Path(sys.argv[1]), "replica-0", lambda: None, background=True)
state = {"model": {"weight": torch.ones(1000)}, "shard": 0, "buffers": []}
saving.begin(5, state, None)
assert not saving.ended(wait=True).fault
def save(state, file):
    file.write(b"half a file")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = save
saving.begin(10, state, None)
saving.ended(wait=True)
"""


@pytest.mark.slow
def test_a_writer_killed_while_it_writes_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    process = Python("-c", WRITER, tmp_path)
    assert process.wait(patience(60)) == -signal.SIGKILL, process.err.read_text()
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "replica-0.jsonl").touch()
    assert list(tmp_path.glob("checkpoints/step-000010/*"))
    assert checkpoint.sound_steps(tmp_path, 0, "replica-0") == [5]


@pytest.mark.slow
def test_a_full_disk_is_told_and_training_goes_on(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(disk, "replica-0", lambda: None, background=True)
    (disk / "filler").write_bytes(bytes(39 << 20))
    big = state(1.0) | {"model": {"weight": torch.ones(1 << 20)}}
    saving.begin(5, big, None)
    told = saving.ended(wait=True)
    assert told and told.fault == os.strerror(28) and not list(disk.glob("checkpoints/*"))
    (disk / "filler").unlink()
    saving.begin(10, big, None)
    assert (told := saving.ended(wait=True)) and not told.fault
    saving.close()
    assert torch.equal(saved(disk, 10, 0)["model"]["weight"], torch.ones(1 << 20))


@pytest.mark.slow
def test_a_run_tells_its_speed_and_traces_the_steps_that_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in alone().items():
        monkeypatch.setenv(name, value)
    asked = ["--profile", "3..4", "--device-tflops", "0.5"]
    assert run_here(monkeypatch, tmp_path, "train", *ALONE, *asked, "--out", "run") == 0
    told = capsys.readouterr()
    path = Path("run", "profile", "replica-0-steps-3..4.json")
    assert f"trace of steps 3..4: {path}; open it at ui.perfetto.dev" in told.err
    names = {event["name"] for event in json.loads((tmp_path / path).read_text())["traceEvents"]}
    assert {"step 3", "step 4"} <= names and not {"step 2", "step 5"} & names and "aten::mm" in names
    lines = (tmp_path / "run" / "events" / "replica-0.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    flops = architecture_of("micro", 16).flops_per_token(Span(0, 2, first=True, last=True), 16)
    for step in steps:
        assert step["mfu"] == pytest.approx(step["tokens_per_second"] * flops / 0.5e12)
        assert {"gradients", "optimizer", "batches", "rest"} <= step["spent"].keys()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["spent"]["gradients"] > 0 and summary["tokens_per_second"] > 0
    assert "tokens/s" in told.out and "of the devices' peak (MFU); time went to" in told.out
    report = run_here(monkeypatch, tmp_path, "report", "run")
    assert report == 0 and "where the replicas" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile": True, "stages": 2, "pipeline_schedule": "zero-bubble"}, "zero-bubble schedule cannot divide"),
        ({"profile": "3..4", "network": "simulated"}, "simulated replicas take turns in one process"),
        ({"profile": "300..500"}, "the run has 400 steps; give steps up to 400"),
        ({"compile": True, "device": "cpu"}, "there is no /no/compiler here; install one"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(UserError, match=words):
        launch.check_settings(Settings.of(model="micro", **settings))


def test_what_a_killed_compiler_has_left_is_named() -> None:
    from torch._inductor.exc import InductorError

    with pytest.raises(UserError, match=r"too short; remove .*compiled.*, which a killed"), telling_of_compilers(True):
        raise InductorError(ImportError("/tmp/torchinductor_me/x.main.so: file too short"), None)
    with pytest.raises(UserError, match=r"no Python.h; mend that, or leave out --compile"), telling_of_compilers(True):
        raise InductorError(RuntimeError("no Python.h"), None)


@pytest.mark.parametrize("steps", ["4..3", "0..2", "three", "1.5"])
def test_steps_to_trace_are_two_numbers(steps: str) -> None:
    with pytest.raises(UserError, match=r"give the first and the last step to trace, such as 20..22"):
        Settings.of(profile=steps)
    assert Settings.of(profile="7").run.profiled == Settings.of(profile="7-7").run.profiled == range(7, 8)


@pytest.mark.parametrize(
    ("card", "peak"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10", 125), ("NVIDIA H100 PCIe", 756)],
)
def test_known_cards_are_found_by_their_names(card: str, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    assert peak_tflops(torch.device("cuda"), "bfloat16") == peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Nothing")
    assert peak_tflops(torch.device("cuda"), "bfloat16") is None and peak_tflops(torch.device("cpu"), "float32") is None


def test_how_far_tensors_are_apart_is_counted_over_all_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("farflung.training.measures.AT_ONCE", 7)
    assert squares_apart(one, other) == pytest.approx(float((one - other).double().norm() ** 2))
