"""Going on with a run, stopping it and beginning it anew: nothing is lost without a word, whoever fell behind."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import SMALL, free_port, run_here, same, same_weights, trained
from torch.distributed import HashStore

from farflung.errors import UserError
from farflung.pipeline import Mesh
from farflung.training import checkpoint, finish
from farflung.training.beginning import how_to_go_on, summary_writers, writing_replicas
from farflung.training.events import EventLog
from farflung.training.export import export
from farflung.training.kept import Kept
from farflung.training.stopping import Stop
from farflung.training.trainer import Trainer

STEPS = 25
BRIEF = [*SMALL, "--steps", str(STEPS)]
SIMULATED = [*BRIEF, "--every", "5", "--network", "simulated", "--replicas", "2"]


PIPELINE = ["--method", "local", "--stages", "2", "--microbatches", "2"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas that keeps all of its checkpoints."""
    return trained(tmp_path_factory, *SIMULATED, "--keep-checkpoints", "9")


def copy(run: Path, to: Path, steps: dict[int, set[int]]) -> Path:
    """A run's folder, in which each replica has its checkpoints of these steps only."""
    subprocess.run(["cp", "-r", run, to], check=True)
    for path in to.glob("checkpoints/step-*/*"):
        if int(path.parent.name[5:]) not in steps[int(path.stem[8:])]:
            path.unlink()
    (to / "summary.json").unlink()
    return to


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{0: {20, 25}, 1: {5, 10}}, {0: {5}, 1: set()}, {0: set(), 1: set()}])
def test_without_a_common_checkpoint_only_a_restart_begins_anew(
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: dict[int, set[int]],
) -> None:
    folder = copy(undisturbed, tmp_path / "run", steps)
    before = everything_in(folder)
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run") == 2
    line = one_line(capsys)
    assert "no checkpoint is there of all replicas" in line and "farflung train --resume run --restart" in line
    if steps[1]:
        assert "steps 20, 25" in line and "steps 5, 10" in line
    assert everything_in(folder) == before
    if steps[1]:
        return
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run", "--restart") == 0
    assert same_weights(undisturbed, folder, STEPS)
    first = json.loads((folder / "events" / "replica-0.jsonl").read_text().splitlines()[0])
    assert not first["resumed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('inner = "muon"', 'inner = "adamw"', "inner is 'adamw', but this run was begun with 'muon'"),
        ('model = "micro"', 'model = "tiny"', "model is 'tiny', but this run was begun with 'micro'"),
        ('method = "noloco"', 'method = "noloco"\ngamma = 0.3', "gamma is 0.3, but this run was begun with unset"),
    ],
)
def test_settings_that_were_edited_are_named(
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    said: str,
) -> None:
    folder = copy(undisturbed, tmp_path / "run", {0: {5}, 1: {5}})
    config = (folder / "config.toml").read_text()
    assert old in config
    (folder / "config.toml").write_text(config.replace(old, new))
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run") == 2
    line = one_line(capsys)
    assert f"run/config.toml has been edited: {said}; change it back, or begin anew with: " in line


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--restart"], [], ["--stages", "2"]])
def test_a_run_that_is_being_trained_is_left_alone(
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    how: list[str],
) -> None:
    folder = copy(undisturbed, tmp_path / "run", {0: {5}, 1: {5}})
    log = EventLog(folder, 1, "replica-1", time.monotonic, keep=0)
    before = everything_in(folder)
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run", *how) == 2
    assert f"being trained by another process (number {os.getpid()} on " in one_line(capsys)
    assert everything_in(folder) == before
    log.close()


def test_of_a_run_on_several_machines_the_command_is_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    told = how_to_go_on(tmp_path)
    assert told == f"go on with: torchrun on all 2 machines as before, and -m farflung train --resume {tmp_path}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "arguments", "words"),
    [
        (3, [], ["a run of 2 replicas, and 3 are started", "start 2 processes", "--resume run --restart"]),
        (1, [], ["a run of 2 replicas, and 1 are started"]),
        (4, ["--stages", "1"], ["a run of 2 replicas, and 4 are started"]),
        (6, ["--stages", "4"], ["6 processes cannot be replicas of 4 stages", "start a multiple of 4"]),
    ],
)
def test_torchrun_with_another_number_of_replicas_is_refused(
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: int,
    arguments: list[str],
    words: list[str],
) -> None:
    folder = copy(undisturbed, tmp_path / "run", {0: {5}, 1: {5}})
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('network = "simulated"', 'network = "torch"'))
    before = everything_in(folder)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run", *arguments) == 2
    line = one_line(capsys)
    assert all(word in line for word in words), line
    assert everything_in(folder) == before


def as_torchrun(monkeypatch: pytest.MonkeyPatch, attempt: int) -> None:
    """This process becomes the only one of a torchrun's, in one of its attempts."""
    here = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    here |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": attempt, "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.slow
@pytest.mark.parametrize("crash", [3, 12])
def test_what_torchrun_starts_again_goes_on_with_what_it_began_and_nothing_else(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], crash: int
) -> None:
    """A crash before the first checkpoint, and one after; then the same command in a launch that did not begin it."""
    command = ["train", *BRIEF, "--method", "local", "--log-every", "1", "--out", "run"]
    original = Trainer._train_step

    def step(trainer: Trainer, outer: Any) -> None:
        original(trainer, outer)
        if trainer.step == crash:
            raise RuntimeError("crash")

    with monkeypatch.context() as first:
        as_torchrun(first, 0)
        first.setattr(Trainer, "_train_step", step)
        with pytest.raises(RuntimeError, match="crash"):
            run_here(first, tmp_path, *command)
        torch.distributed.destroy_process_group()
    with monkeypatch.context() as second:
        as_torchrun(second, 1)
        assert run_here(second, tmp_path, *command) == 0
    lines = (tmp_path / "run" / "events" / "replica-0.jsonl").read_text().splitlines()
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))

    capsys.readouterr()
    before = everything_in(tmp_path / "run")
    for attempt in (0, 1):
        as_torchrun(monkeypatch, attempt)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
        assert run_here(monkeypatch, tmp_path, *command, "--seed", "7") == 2
        assert "already holds a run" in one_line(capsys) and everything_in(tmp_path / "run") == before


@pytest.mark.slow
def test_who_trains_by_itself_stops_though_its_next_step_does_not_come() -> None:
    """As a swarm's peer whose steps all take together, when the others have stopped before it."""
    stop = Stop(HashStore(), [0], [0])
    with stop.listening():
        assert not stop.due_after(0, 501)
        stop.request()
        assert stop.due_after(0, 501)


def test_a_wish_to_stop_reaches_all_and_nobody_passes_the_step() -> None:
    """Processes that train at paces of their own; one of them is told to stop, once it has gone some way."""
    store = HashStore()
    stops = [Stop(store, range(3), [process]) for process in range(3)]
    ended: dict[int, int] = {}

    def train(process: int) -> None:
        step = 0
        with stops[process].listening():
            while process not in ended:
                step += 1
                sum(range(1000 * (process + 1)))
                if process == 1 and step == 30:
                    stops[1].request()
                if stops[process].due_after(process, step):
                    ended[process] = step

    threads = [threading.Thread(target=train, args=(process,)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(ended) == 3 and len(set(ended.values())) == 1 and ended[1] >= 30


def test_only_what_everyone_has_counts_as_whole() -> None:
    living = [0, 1, 2]
    kept = Kept(HashStore(), lambda: living)
    for process, steps in enumerate([{10, 20, 30, 40}, {10, 20}, {10}]):
        kept.tell(process, dict.fromkeys(steps))
    assert kept.whole() == [10] and kept.needed(0, keep=1) == (10, None) and kept.needed(0, keep=2) == (0, None)
    kept.add(1, 30, None)
    living.remove(2)
    assert kept.whole() == [30, 20, 10] and kept.needed(0, keep=2) == (20, None)
    living.append(3)  # who has said nothing yet
    assert kept.whole() == []


def test_the_best_checkpoint_is_the_one_of_the_least_mean_loss_and_stays() -> None:
    kept = Kept(HashStore(), lambda: (0, 1))
    for process, losses in enumerate([{10: 1.0, 20: 3.0, 40: float("nan")}, {10: 4.0, 20: 1.5, 40: 0.1}]):
        kept.tell(process, losses)
    assert kept.best() == 20  # 10 is better for one of them only, and what is not finite is no loss
    assert kept.needed(0, keep=1) == (40, 20)
    kept.add(0, 50, None)
    kept.add(1, 50, 0.0)
    assert kept.best() == 20  # until all have judged the new one
    kept.add(0, 50, 0.5)
    assert kept.needed(0, keep=1) == (50, 50)


def test_on_each_machine_one_replica_writes_and_one_process_tells() -> None:
    for layout, machines, replicas, processes in [
        (Mesh.alike(3, stages=2), "aaabbb", {"a": 0, "b": 2}, {0, 4}),
        (Mesh.alike(3, stages=4), "aaaaaabbbbbb", {"a": 0, "b": 2}, {0, 8}),
        (Mesh.alike(1, stages=4), "aabb", {"a": 0, "b": 0}, {0, 2}),
        (Mesh.alike(2, shards=2), "abbb", {"a": 0, "b": 1}, {0, 2}),
        (Mesh.alike(4), "abab", {"a": 0, "b": 1}, {0, 1}),
    ]:
        on = dict(enumerate(machines))
        assert writing_replicas(layout, on) == replicas and summary_writers(layout, on) == processes
    without_replica_0 = {2: "a", 3: "a", 4: "b", 5: "b"}
    assert writing_replicas(Mesh.alike(3, stages=2), without_replica_0) == {"a": 1, "b": 2}
    assert summary_writers(Mesh.alike(3, stages=2), without_replica_0) == {2, 4}


CONDITIONS = """
step_ms = 100
speed_sigma = 0.1
step_sigma = 0.2
latency_sigma = 0.3
[[deaths]]
replica = 2
at_s = {first}
[[deaths]]
replica = 3
at_s = {second}
[[cuts]]
replicas = [0]
from_s = {cut}
until_s = {until}
"""


def events(folder: Path, replica: int) -> list[dict[str, Any]]:
    """What happened to a replica in its world; but for the rates, which are counted anew."""
    lines = map(json.loads, (folder / "events" / f"replica-{replica}.jsonl").read_text().splitlines())
    kept = [event for event in lines if event["event"] in ("step", "round", "evaluation", "end")]
    return [{key: value for key, value in event.items() if key != "tokens_per_second"} for event in kept]


def crash(
    monkeypatch: pytest.MonkeyPatch, folder: Path, command: list[str], at: int, replica: int | None = None
) -> None:
    """Ends a run when a replica, or any, has made so many steps."""
    original = Trainer._train_step

    def step(trainer: Trainer, outer: Any) -> None:
        if trainer.step == at and replica in (None, trainer.network.rank):
            raise RuntimeError("power cut")
        original(trainer, outer)

    with monkeypatch.context() as crashing:
        crashing.setattr(Trainer, "_train_step", step)
        with pytest.raises(RuntimeError, match="power cut"):
            run_here(crashing, folder, *command)


@pytest.mark.slow
def test_a_simulated_world_goes_on_where_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 2 dies and replica 0 is cut off before the crash, replica 3 dies after it; none of it happens twice."""
    (tmp_path / "world.toml").write_text(CONDITIONS.format(first=0.75, second=2.35, cut=1.0, until=1.3))
    command = [
        "train",
        *BRIEF,
        "--every",
        "5",
        "--network",
        "simulated",
        "--replicas",
        "4",
        "--conditions",
        "world.toml",
        "--device",
        "cpu",
    ]
    assert run_here(monkeypatch, tmp_path, *command, "--out", "undisturbed") == 0
    crash(monkeypatch, tmp_path, [*command, "--out", "crashed"], 19)
    assert checkpoint.whole_steps(tmp_path / "crashed")[0] == 15
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "crashed") == 0
    for replica in range(4):
        assert events(tmp_path / "crashed", replica) == events(tmp_path / "undisturbed", replica)
    ends = {replica: events(tmp_path / "crashed", replica)[-1] for replica in range(4)}
    assert [ends[replica]["reason"] for replica in range(4)] == ["finished", "finished", "died", "died"]
    assert ends[2]["step"] < 10 and 15 < ends[3]["step"] < STEPS
    assert same_weights(tmp_path / "undisturbed", tmp_path / "crashed", STEPS)
    for folder in ("undisturbed", "crashed"):  # the dead keep their own files, and no others
        living = [path for replica in (0, 1) for path in tmp_path.glob(f"{folder}/checkpoints/*/replica-{replica}.pt")]
        assert {path.parent.name for path in living} == {"step-000020", "step-000025"}


@pytest.mark.slow
def test_what_others_ask_of_a_round_that_was_given_up_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replica 1 is seconds ahead after a cut; its part of round 5 is averaged long after its checkpoint."""
    world = "step_ms = 100\nbandwidth_mbps = 10\nstep_sigma = 0.3\nseed = 3\n"
    (tmp_path / "world.toml").write_text(f"{world}[[cuts]]\nreplicas = [1]\nfrom_s = 0.51\nuntil_s = 2.06\n")
    command = [
        *("train", *SMALL, "--steps", "30", "--checkpoint-every", "3", "--method", "eager-diloco", "--every", "5"),
        *("--codec", "ef-int8", "--deadline", "1", "--network", "simulated", "--replicas", "3"),
        *("--conditions", "world.toml"),
    ]
    assert run_here(monkeypatch, tmp_path, *command, "--out", "undisturbed") == 0
    crash(monkeypatch, tmp_path, [*command, "--out", "crashed"], 28, replica=0)
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "crashed") == 0
    for replica in range(3):
        assert events(tmp_path / "crashed", replica) == events(tmp_path / "undisturbed", replica)
    assert same_weights(tmp_path / "undisturbed", tmp_path / "crashed", 30)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can only be mounted by root")
def test_a_disk_that_is_full_at_the_end_loses_no_result(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """First somebody makes room after a while; then nobody does."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    original, filled, trials = Trainer.prune, [False], 0

    def fill(trainer: Trainer) -> None:
        original(trainer)
        if trainer.step == STEPS and not filled[0]:
            filled[0] = True
            with (disk / "filler").open("ab", 0) as file, pytest.raises(OSError, match="No space"):
                while file.write(bytes(4096)):
                    pass

    def wait(seconds: float) -> None:
        nonlocal trials
        trials += 1
        if trials == 3:
            (disk / "filler").unlink()

    try:
        monkeypatch.setattr(Trainer, "prune", fill)
        monkeypatch.setattr(finish, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
        assert run_here(monkeypatch, tmp_path, "train", *SIMULATED, "--out", "disk/run") == 0
        said = capfd.readouterr()
        assert "No space left on device; make room" in said.err and '"validation_loss_averaged": ' in said.err
        assert "a sample from the trained model" in said.out
        averaged, expected = (
            checkpoint.read(checkpoint.average_of(run))["model"] for run in (disk / "run", undisturbed)
        )
        assert same(averaged, expected)

        filled[0] = False
        monkeypatch.setattr(finish, "TRY_FOR_SECONDS", 0.0)
        assert run_here(monkeypatch, tmp_path, "train", "--resume", "disk/run", "--restart") == 1
        said = capfd.readouterr()
        assert '"validation_loss_averaged": ' in said.err and "Traceback" not in said.err
        (disk / "filler").unlink()
        assert run_here(monkeypatch, tmp_path, "train", "--resume", "disk/run") == 0
        assert (disk / "run" / "summary.json").exists()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_an_island_on_two_machines_ends_well_and_is_exported_from_both_folders_together(tmp_path: Path) -> None:
    port = free_port()
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    machines = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "farflung",
                "train",
                *BRIEF,
                *PIPELINE,
                "--out",
                str(tmp_path / f"machine-{n}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**common, "RANK": str(n), "GROUP_RANK": str(n)},
        )
        for n in (0, 1)
    ]
    try:
        for machine in machines:
            said, complaint = machine.communicate(timeout=500)
            assert machine.returncode == 0, complaint
            assert "a sample from the trained model" in said
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    for n in (0, 1):
        assert (tmp_path / f"machine-{n}" / "summary.json").exists()
        with pytest.raises(UserError, match="copy the folders of all machines together"):
            export(tmp_path / f"machine-{n}", tmp_path / "model")
    subprocess.run(["cp", "-r", f"{tmp_path}/machine-1/.", f"{tmp_path}/machine-0"], check=True)
    assert "averaged at the end" in export(tmp_path / "machine-0", tmp_path / "model")
    for path in tmp_path.glob("machine-0/checkpoints/averaged*"):
        path.unlink()
    assert "checkpoints at step 25" in export(tmp_path / "machine-0", tmp_path / "other")


def test_a_run_that_has_ended_goes_on_with_more_steps_and_its_best_weights_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learning rate then rises so far that the loss does, too."""
    assert run_here(monkeypatch, tmp_path, "train", *SIMULATED, "--steps", "10", "--out", "run") == 0
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    on = ["train", "--resume", "run", "--lr", "3.0", "--keep-checkpoints", "1"]
    assert run_here(monkeypatch, tmp_path, *on, "--steps", "9") == 2
    assert "--steps 9 is given, but run has come to step 10; give more" in capsys.readouterr().err
    assert run_here(monkeypatch, tmp_path, *on, "--steps", "30") == 0
    after = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (before["steps"], after["steps"], after["rounds"]) == (10, 30, 6)
    assert after["validation_loss"] > before["validation_loss"]
    assert checkpoint.whole_steps(tmp_path / "run") == [30, 10]  # the last, and the best
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, "export", "run", "best", "--best") == 0
    loss = f"{before['validation_loss']:.4f}"
    assert f"the checkpoints of 2 replicas at step 10, the best: validation loss {loss}" in capsys.readouterr().out
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_after_max_hours_all_stop_at_one_step_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*SIMULATED, "--steps", "100000", "--max-hours", "1e-9", "--out", "run"]
    assert run_here(monkeypatch, tmp_path, "train", *arguments) == 0
    (step,) = checkpoint.whole_steps(tmp_path / "run")[:1]
    said = capsys.readouterr().err
    assert f"max_hours is over: stopped after step {step}; its last checkpoint is of step {step}; go on with" in said
