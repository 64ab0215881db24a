"""The commands that `farflung plan` prints: training takes all of them, and a few are run as they are printed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patience
from processes import free_port, run_here

from farflung.cli.arguments import parse
from farflung.planner.choices import Choice
from farflung.planner.command import commands
from farflung.planner.layout import Layout
from farflung.planner.machines import Cluster, Machines
from farflung.planner.options import PlanOptions
from farflung.planner.plan import plan
from farflung.settings import Settings
from farflung.training import launch


def kind(site: str, count: int, workers: int, memory_gb: float) -> str:
    return (
        f'[[machines]]\nsite = "{site}"\ncount = {count}\nworkers = {workers}\nmemory_gb = {memory_gb}\n'
        "tflops = 0.05\nnetwork_gbps = 1\n"
    )


LINK = '[[links]]\nbetween = ["a", "b"]\nlatency_ms = 20\nbandwidth_mbps = 50\nshared = true\n'

FILES = {
    "one worker": kind("a", 1, 1, 4),
    "two machines": kind("a", 2, 1, 4),
    "two sites": kind("a", 1, 4, 4) + kind("b", 1, 4, 4) + LINK,
    "little memory": kind("a", 2, 4, 1.0061),
    "two pairs": kind("a", 2, 2, 1.003),
    "many small": kind("a", 8, 1, 1.0061),
    "uneven": kind("a", 1, 3, 4) + kind("b", 1, 2, 4) + LINK,
}
SMALL = ["--model", "micro", "--sequence-length", "32", "--batch-tokens", "512", "--tokens", "1024"]
ASKED = {
    "": [],
    "lean": ["--precision", "bfloat16", "--boundary", "int8", "--recompute"],
    "few": ["--boundary", "subspace8"],
    "late": ["--every", "2", "--delay", "1", "--codecs", "int8,ef-lowrank4-int4", "--methods", "diloco,noloco"],
}


def printed(folder: Path, text: str, asked: list[str], capsys: Any, monkeypatch: Any) -> list[str]:
    """The commands that `farflung plan` prints."""
    (folder / "m.toml").write_text(text)
    arguments = ["plan", *SMALL, "--machines", "m.toml", "--search-s", "1", "--show", "100", *asked]
    assert run_here(monkeypatch, folder, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    return [re.sub(r"^ *\d+ ", "", line) for line in lines if "farflung train" in line]


def settings_in(command: str) -> Settings:
    """What training is told."""
    words = shlex.split(command, comments=True)
    return parse(Settings, words[words.index("train") + 1 :], "train", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked"),
    [*((name, "") for name in FILES), ("many small", "lean"), ("two sites", "late"), ("two sites", "few")],
)
def test_training_takes_every_command_that_is_printed(
    name: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(tmp_path, FILES[name], ASKED[asked], capsys, monkeypatch)
    assert lines
    taken = set()
    for number, line in enumerate(lines):
        config = settings_in(line)
        config.settled()
        if (config.island.stages, config.island.shard) not in taken:
            launch.prepare(config, tmp_path / f"run {number}", resume=False)  # all that is refused before a run starts
        tokens = config.run.replicas * config.island.batch_size * config.workload.sequence_length
        assert 256 <= tokens <= 512 and config.run.steps == -(-1024 // tokens)
        taken.add((config.island.stages, config.island.shard))
        if asked == "lean":
            assert config.island.precision == "bfloat16" and config.island.recompute
            assert config.island.boundary == ("int8" if config.island.stages > 1 else "float32")
        if asked == "late":
            assert (config.rounds.every, config.rounds.delay) == (2, 1) or config.rounds.method == "local"
        started = re.search(r"--nnodes (\d+) .*--nproc-per-node (\d+)", line)
        if started and "on " not in line:
            processes = int(started[1]) * int(started[2])
            assert processes == config.run.replicas * config.island.stages * config.island.shard
    if name == "one worker":
        assert [settings_in(line).rounds.method for line in lines] == ["local"]


def test_stages_that_are_placed_anyhow_have_a_command_for_each_stretch_of_processes() -> None:
    """Torchrun numbers a machine's processes one after the other; islands may go to and fro between machines."""
    two = Cluster((Machines(2, 80, 100, "a", workers=2),))
    config = Settings.of(method="diloco", stages=2, replicas=2)
    apart = commands(Choice(config, Layout(2, 2, 1, ((0, 2), (1, 3)))), two)
    assert [line.partition(" --master")[0] for line in apart] == [
        "on a 0: CUDA_VISIBLE_DEVICES=0 torchrun --nnodes 4 --node-rank 0 --nproc-per-node 1",
        "on a 1: CUDA_VISIBLE_DEVICES=0 torchrun --nnodes 4 --node-rank 1 --nproc-per-node 1",
        "on a 0: CUDA_VISIBLE_DEVICES=1 torchrun --nnodes 4 --node-rank 2 --nproc-per-node 1",
        "on a 1: CUDA_VISIBLE_DEVICES=1 torchrun --nnodes 4 --node-rank 3 --nproc-per-node 1",
    ]
    assert len({line.split()[-1] for line in apart}) == 4  # a machine's runs have folders of their own
    (together,) = commands(Choice(config, Layout(2, 2, 1, ((2, 3), (0, 1)))), two)
    assert together.endswith("--method diloco --replicas 2 --stages 2 --out runs/planned   # RANK from 0: a 1, a 0")
    uneven = commands(Choice(config.changed(replicas=1, stages=3), Layout(1, 3, 1, ((0, 1, 2),))), two)
    assert [line.partition(" --master")[0] for line in uneven] == [
        "on a 0: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2",
        "on a 1: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1",
    ]


def run(commands: list[str], folder: Path) -> list[dict[str, Any]]:
    """Commands as they are printed, all machines being this one; the summaries that they leave."""
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = int((re.search(r"--nnodes (\d+)", commands[0]) or ["", "1"])[1])
    started = []
    try:
        for rank, command in enumerate(commands if len(commands) == nodes else commands * nodes):
            printed = command.partition(": ")[2] if command.startswith("on ") else command
            words = shlex.split(printed.replace("HOST0", "127.0.0.1").replace("29500", port), comments=True)
            module = [sys.executable, "-m"] + (["farflung"] if words[0] == "farflung" else ["torch.distributed.run"])
            words = [str(rank) if word == "RANK" else word for word in words[1:]]
            words = [*module, *words, "--eval-sequences", "4", "--max-tokens", "100000", "--deadline", "60"]
            place = folder / f"machine {rank}"
            place.mkdir(parents=True)
            started.append(subprocess.Popen(words, cwd=place, env=environment, stderr=subprocess.PIPE, text=True))
        for process in started:
            _, errors = process.communicate(timeout=patience(120))
            assert process.returncode == 0, errors
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads(path.read_text()) for path in folder.rglob("machine 0/runs/*/summary.json")]


@pytest.mark.slow
def test_islands_that_share_a_machine_with_half_of_another_train_as_planned(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(FILES["uneven"])
    asked = PlanOptions("micro", tmp_path / "m.toml", 1024, sequence_length=32, batch_tokens=512, search_s=0)
    plans, _, cluster = plan(asked)
    choice = next(
        found.choice for found in plans if (found.choice.layout.stages, found.choice.layout.replicas) == (2, 2)
    )
    lines = commands(choice, cluster)
    assert [line.partition(" --master")[0] for line in lines] == [
        "on a 0: torchrun --nnodes 2 --node-rank 0 --nproc-per-node 3",
        "on b 1: torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1",
    ]
    (summary,) = run(lines, tmp_path / "runs")
    assert summary["tokens"] == choice.settings.run.steps * 512


@pytest.mark.slow
def test_the_best_command_trains_as_it_was_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--every", "1", "--boundary", "int8", "--recompute"]  # so that no plan of memory saves it from stages
    best = printed(tmp_path, FILES["two pairs"], asked, capsys, monkeypatch)[0]
    config = settings_in(best)
    assert (config.run.replicas, config.island.stages, config.island.boundary) == (2, 2, "int8")
    (summary,) = run([best], tmp_path / "runs")
    assert (
        summary["tokens"]
        == config.run.steps * config.run.replicas * config.island.batch_size * config.workload.sequence_length
    )
    assert (summary["method"], summary["replicas"], summary["stages"]) == (config.rounds.method, 2, 2)
