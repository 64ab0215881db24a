"""Replicas that are members of their own on one machine: real processes, which are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from patience import patience, until
from processes import farflung, fill, run_here
from safetensors.torch import load_file
from warm import Python

from farflung.events import JoinedEvent, RoundEvent, StartEvent, StepEvent
from farflung.report.read import E, Run
from farflung.testing.hosts import processes_of
from farflung.training import checkpoint

SETTINGS = [
    *("--independent", "--model", "micro", "--every", 10, "--batch-size", 2, "--sequence-length", 32),
    *("--eval-sequences", 4, "--eval-every", 50, "--log-every", 1, "--checkpoint-every", 10, "--max-tokens", 200_000),
]


def _writes_to(pid: int) -> str:
    """The stem of the file that a process writes its errors to; "" of one that has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/fd/2").readlink().stem
    except FileNotFoundError:
        return ""


class Launched:
    """A `farflung train --independent` in a folder, and what it has written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.launcher: Python | None = None

    def start(self, *arguments: object) -> Python:
        files = {"out": self.folder / "out", "err": self.folder / "err"}
        self.launcher = Python("-m", "farflung", "train", *arguments, cwd=self.folder, **files)
        return self.launcher

    def train(self, *arguments: object) -> Python:
        return self.start(*SETTINGS, "--deadline", patience(15), "--out", "run", *arguments)

    def process(self, number: int) -> int:
        """The process of a replica; 0 while there is none."""
        return next((pid for pid in processes_of(self.run) if _writes_to(pid) == f"replica-{number}"), 0)

    def kill(self, number: int) -> None:
        os.kill(self.process(number), signal.SIGKILL)

    def events(self, number: int, kind: type[E]) -> list[E]:
        run = Run(self.run)
        run.refresh()
        return run.of(number, kind)

    def step(self, number: int) -> int:
        return max((event.step for event in self.events(number, StepEvent)), default=0)

    def averaged(self, number: int) -> int:
        return [event.outcome for event in self.events(number, RoundEvent)].count("averaged")

    def stop(self) -> None:
        if self.launcher:
            self.launcher.kill()
        for number in range(3):
            if process := self.process(number):
                os.kill(process, signal.SIGKILL)

    def said(self) -> str:
        return (self.folder / "err").read_text()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    made = Launched(tmp_path.resolve())
    yield made
    made.stop()


@pytest.mark.slow
def test_a_death_costs_only_its_replica_which_comes_back_and_all_stop_and_go_on(launched: Launched) -> None:
    launcher = launched.train("--replicas", 3, "--restarts", 1, "--steps", 100_000)
    until(lambda: all(launched.averaged(number) > 1 for number in range(3)), 120)
    status = farflung("status", launched.run, "--once", "--listen", "127.0.0.1")
    assert "3 peers in training" in status.stdout, status
    doctor = farflung("doctor", launched.run, "--listen", "127.0.0.1")
    assert doctor.returncode == 0, doctor
    began = {number: launched.step(number) for number in (0, 2)}
    launched.kill(1)
    until(lambda: launched.events(1, JoinedEvent) and launched.step(1) > max(began.values()), 120)
    assert "replica 1: it died of signal 9; it is started again (1 of 1); see run/logs/replica-1.log" in launched.said()
    assert "step " in launched.said().partition("which ends:\n    ")[2], "the last lines of its output"

    before = launched.step(0)
    launched.kill(1)
    until(lambda: "replica 1: it died of signal 9; it has died too often" in launched.said())
    until(lambda: launched.step(0) > before + 30 and launched.step(2) > before + 30)
    for number in (0, 2):
        assert len(launched.events(number, StartEvent)) == 1
        assert all(b.tokens >= a.tokens + 64 for a, b in pairwise(launched.events(number, StepEvent)))
        waits = [event.landed - event.waited_from for event in launched.events(number, RoundEvent)]
        assert max(waits) <= patience(15) + 1, "nobody waits for the dead longer than a deadline"

    assert farflung("report", launched.run).returncode == 0
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(patience(60)) == 130
    assert "farflung: stopped by a signal; go on with: farflung train --resume run" in launched.said()
    assert not any(launched.process(number) for number in range(3))
    reached = {number: checkpoint.whole_steps(launched.run / f"replica-{number}")[0] for number in (0, 2)}
    assert all(reached[number] > before for number in reached)

    launcher = launched.start("--resume", "run")
    until(lambda: all(launched.step(number) > max(reached.values()) + 70 for number in range(3)), 120)
    assert launched.averaged(1) > 0
    for number in (0, 2):
        later = [event for event in launched.events(number, RoundEvent) if event.started_step > reached[number]]
        outcomes = [event.outcome for event in later[:6]]  # in pairs of three, one is left over
        assert "averaged" in outcomes, "those that go on begin together, too"
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(patience(60)) == 130


@pytest.mark.slow
def test_the_results_are_written_once_over_all_that_come_to_the_end(launched: Launched) -> None:
    assert launched.train("--replicas", 2, "--steps", 40).wait(patience(120)) == 0, launched.said()
    summary = json.loads((launched.run / "summary.json").read_text())
    parts = [json.loads((launched.run / f"replica-{number}" / "summary.json").read_text()) for number in (0, 1)]
    assert summary["missing"] == [] and summary["replicas"] == 2
    assert all((launched.run / f"replica-{number}" / "config.toml").exists() for number in (0, 1))
    for number, part in enumerate(parts):  # one that falls behind goes on from where the other is
        trained = launched.events(number, StepEvent)
        assert part["tokens"] == trained[-1].tokens == 64 * len(trained), "what it has trained on itself"
    assert any(launched.averaged(number) for number in (0, 1)), "they begin together, and met"
    assert summary["validation_loss_per_replica"] == [part["validation_loss"] for part in parts]
    assert summary["tokens"] == sum(part["tokens"] for part in parts) and summary["weight_spread"] > 0
    assert summary["validation_loss_averaged"] < 5
    finals = [checkpoint.read(checkpoint.average_of(launched.run / f"replica-{n}"))["model"] for n in (0, 1)]
    averaged = checkpoint.read(checkpoint.average_of(launched.run))["model"]
    assert averaged.keys() == finals[0].keys()
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, (finals[0][name] + finals[1][name]) / 2)
    assert "a sample from the trained model" in (launched.folder / "out").read_text()
    exported = farflung("export", launched.run, launched.folder / "model")
    assert exported.returncode == 0 and "averaged at the end" in exported.stdout, exported

    (launched.run / "summary.json").unlink()
    assert launched.start("--resume", "run").wait(patience(120)) == 0, launched.said()
    assert json.loads((launched.run / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_a_stopped_run_is_exported_as_the_mean_of_its_replicas_last_checkpoints(launched: Launched) -> None:
    launcher = launched.train("--replicas", 2, "--steps", 100_000)
    homes = [launched.run / f"replica-{number}" for number in (0, 1)]
    until(lambda: all(checkpoint.whole_steps(home) for home in homes), 120)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(patience(60)) == 130
    steps = sorted(checkpoint.whole_steps(home)[0] for home in homes)
    exported = farflung("export", launched.run, launched.folder / "model")
    assert exported.returncode == 0, exported
    at = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
    assert f"the mean of 2 replicas' checkpoints at {at}" in exported.stdout
    last = [path for home in homes for path in (home / "checkpoints").glob(f"*{checkpoint.whole_steps(home)[0]}/*.pt")]
    one, other = (checkpoint.read(path)["model"] for path in last)
    means = sorted(float((one[name] + other[name]).norm() / 2) for name in one)
    found = sorted(
        float(weight.norm()) for weight in load_file(launched.folder / "model" / "model.safetensors").values()
    )
    assert found == pytest.approx(means, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can only be mounted by root")
def test_a_disk_that_is_full_at_the_end_is_told_of_and_the_results_are_written_once_there_is_room(
    launched: Launched,
) -> None:
    launched.run.mkdir()
    disk = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(launched.run)]
    if subprocess.run(disk, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        launcher = launched.train("--replicas", 2, "--steps", 100)
        until(lambda: all(launched.step(number) > 10 for number in (0, 1)), 120)
        fill(launched.run)
        until(lambda: "No space left on device; make room" in launched.said(), 120)
        (launched.run / "filler").unlink()
        assert launcher.wait(patience(60)) == 0, launched.said()
        assert (launched.run / "summary.json").exists()
    finally:
        launched.stop()
        subprocess.run(["umount", "-l", str(launched.run)], check=True)


@pytest.mark.slow
def test_the_results_are_without_a_replica_that_has_died_too_often(launched: Launched) -> None:
    launcher = launched.train("--replicas", 3, "--restarts", 0, "--steps", 600)
    until(lambda: all(launched.averaged(number) > 0 for number in range(3)), 120)
    launched.kill(0)  # the others have joined by it
    assert launcher.wait(patience(120)) == 0, launched.said()
    summary = json.loads((launched.run / "summary.json").read_text())
    assert summary["missing"] == [0] and len(summary["validation_loss_per_replica"]) == 2
    assert "all figures are without replica 0" in (launched.folder / "out").read_text()


@pytest.mark.slow
def test_replicas_end_when_their_launcher_is_killed(launched: Launched) -> None:
    launcher = launched.train("--replicas", 2, "--steps", 100_000)
    until(lambda: all(launched.averaged(number) > 0 for number in range(2)), 120)
    launcher.kill()
    until(lambda: not any(launched.process(number) for number in range(2)))
    assert checkpoint.whole_steps(launched.run / "replica-1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "ddp"], ["needs all replicas at every step"]),
        (["--network", "simulated"], ["network is 'simulated'", "leave out --independent"]),
        (["--stages", 2], ["one process", "leave out --stages"]),
        (["--shard", 2], ["one process", "leave out --stages, --shard"]),
        (["--replicas", 2, "--islands", "1x1 2x1"], ["one process", "--islands"]),
        (["--replicas", 1], ["replicas is 1", "leave out --independent"]),
        (["--restarts", -1], ["--restarts is -1", "at least 0"]),
        (["--shares", "apart"], ["the number of replicas is not known"]),
        (["--data", "no/such/*.txt"], ["no/such"]),
    ],
)
def test_what_independent_replicas_cannot_do_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    words: list[str],
) -> None:
    assert run_here(monkeypatch, tmp_path, "train", "--independent", *map(str, arguments), "--out", "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("farflung: ") and all(word in line for word in words), line
    assert not list(tmp_path.iterdir())


def test_what_only_independent_replicas_can_do_is_refused_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in [
        (["train", "--restarts", "5"], "add --independent"),
        (["invite", "--name", "x", "--independent"], "leave out --independent"),
    ]:
        assert run_here(monkeypatch, tmp_path, *arguments) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert run_here(monkeypatch, tmp_path, "train", "--independent", "--out", "run") == 2
    assert "without torchrun" in capsys.readouterr().err


def test_other_runs_leave_the_folder_of_independent_replicas_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (events := tmp_path / "runs" / "noloco-1" / "replica-0" / "events").mkdir(parents=True)
    (events / "replica-77.jsonl").touch()
    for arguments in ([], ["--independent"]):
        assert run_here(monkeypatch, tmp_path, "train", *arguments, "--out", "runs/noloco-1") == 2
        assert "already holds a run" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    from farflung.cli.arguments import free_folder

    assert free_folder("noloco") == Path("runs/noloco-2")
