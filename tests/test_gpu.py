"""On a real CUDA device: codecs, rounds beside training, and runs of the command; left out where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from processes import HERE, SMALL, run_here, run_together, saved
from test_speed import STEPS, alone, killed_and_resumed_as_undisturbed
from warm import Python

from farflung.codecs import CODECS, codec_named

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

EXAMPLES = [example for row in CODECS.values() for example in row.examples]
ALONE = [*SMALL, "--steps", str(STEPS), "--method", "local", "--device", "cuda"]

ASYNCHRONOUS = """
import sys, torch
from farflung import cli
from farflung.training.trainer import Trainer
original = Trainer._train_step
def step(self, session):
    logs = (self.step + 1) % 5 == 0
    torch.cuda.set_sync_debug_mode("default" if logs or self.step < 2 else "error")
    try:
        original(self, session)
    finally:
        torch.cuda.set_sync_debug_mode("default")
Trainer._train_step = step
sys.argv = ["farflung", *sys.argv[1:]]
cli.main()
"""


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """|found - wanted| / |wanted|."""
    apart = sum(float((one.cpu() - other).double().square().sum()) for one, other in zip(found, wanted, strict=True))
    return (apart / sum(float(one.double().square().sum()) for one in wanted)) ** 0.5


@pytest.mark.parametrize("name", EXAMPLES)
def test_codecs_leave_out_as_much_as_on_the_cpu_and_read_each_others_packets(name: str) -> None:
    message = [torch.randn(200, 192), torch.randn(70)]
    there = [tensor.cuda() for tensor in message]
    on_cpu, on_gpu = codec_named(name), codec_named(name)
    for codec in (on_cpu, on_gpu):
        codec.seed(3)
    for _ in range(2):
        here, packet = on_cpu.encode(message), on_gpu.encode(there)
        assert packet.device.type == "cpu" and packet.is_pinned()
        own = [tensor * 1.001 for tensor in there]
        decoded, crossed = on_gpu.decode(packet, own), on_gpu.decode(here, own)
        assert {tensor.device.type for tensor in [*decoded, *crossed]} == {"cuda"}
        wanted = distance(on_cpu.decode(here, [tensor * 1.001 for tensor in message]), message)
        assert distance(decoded, message) == pytest.approx(wanted, rel=0.05, abs=1e-6)
        assert distance(crossed, message) == pytest.approx(wanted, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("codec", ["float32", "int8", "modulo4"])
@pytest.mark.parametrize("method", ["noloco", "diloco", "dilocox", "streaming_diloco"])
def test_rounds_beside_training_come_to_what_they_do_on_the_cpu(tmp_path: Path, method: str, codec: str) -> None:
    if codec == "modulo4" and method != "noloco":
        pytest.skip("members of an all-reduce need equal means")
    for device in ("cpu", "cuda"):
        run_together(2, HERE / "gpu_replica.py", device, method, codec, tmp_path / device)
    for rank in range(2):
        (wanted, told), (found, told_there) = (torch.load(tmp_path / f"{kind}-{rank}") for kind in ("cpu", "cuda"))
        assert distance(found, wanted) < (1e-5 if codec == "float32" else 3e-3)
        assert [outcome for outcome, _ in told] == [outcome for outcome, _ in told_there]
        assert told and {outcome for outcome, _ in told} == {"averaged"}
        for (_, error), (_, error_there) in zip(told, told_there, strict=True):
            assert error_there == pytest.approx(error, rel=0.1, abs=0.002)


@pytest.mark.parametrize(
    "mode",
    [
        ["--precision", "bfloat16", "--inner", "adamw"],
        ["--compile", "--precision", "bfloat16", "--microbatches", "2"],
        ["--offload"],
    ],
)
def test_killed_and_resumed_is_as_undisturbed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: list[str]
) -> None:
    killed_and_resumed_as_undisturbed(tmp_path, monkeypatch, *ALONE, *mode)


@pytest.mark.parametrize("mode", [[], ["--precision", "bfloat16", "--inner", "adamw"], ["--inner", "muon"]])
def test_a_step_waits_for_the_device_only_where_it_logs(tmp_path: Path, mode: list[str]) -> None:
    process = Python("-c", ASYNCHRONOUS, "train", *ALONE, *mode, "--out", tmp_path / "run", **alone())
    assert process.wait(patience(100)) == 0, process.err.read_text()


def test_replicas_on_a_gpu_learn_what_they_do_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        run = [*SMALL, "--steps", "20", "--replicas", "4", "--every", "5", "--network", "simulated", "--device", device]
        assert run_here(monkeypatch, tmp_path, "train", *run, "--out", device) == 0
        losses[device] = [saved(tmp_path / device, 20, replica)["model"] for replica in range(4)]
    for one, other in zip(losses["cpu"], losses["cuda"], strict=True):
        assert distance(list(other.values()), list(one.values())) < 1e-2
