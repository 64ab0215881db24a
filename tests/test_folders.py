"""Run folders that disks, copies and other programs have spoilt, and those that cannot be written to."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from patience import patience
from processes import SMALL, fill, free_port, run_here, same_weights, trained
from warm import Python

from farflung.errors import UserError
from farflung.files import event_files
from farflung.training import beginning, checkpoint, events
from farflung.training.events import holds_a_run
from farflung.training.export import export
from farflung.training.stopping import StoppedError
from farflung.training.trainer import Trainer

pytestmark = pytest.mark.slow

STEPS = 20
TWO = [*SMALL, "--every", "5", "--steps", str(STEPS), "--keep-checkpoints", "9", "--replicas", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas that keeps all of its checkpoints."""
    return trained(tmp_path_factory, *TWO, "--network", "simulated")


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of it, as if it had not ended yet."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "checkpoints" / "averaged.pt").unlink()
    return tmp_path / "run"


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("length", [0, 1000, -1, None])
def test_a_checkpoint_that_was_cut_or_has_a_wrong_bit_counts_as_none_and_is_named(
    run: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], length: int | None
) -> None:
    """Resume and export go on from the newest one that all replicas have whole."""
    spoilt = checkpoint.path_of(copied, STEPS, "replica-1")
    flip_a_bit(spoilt) if length is None else cut(spoilt, length)
    assert run_here(monkeypatch, copied.parent, "export", "run", "model") == 0
    said = capsys.readouterr().out
    assert "checkpoints at step 15" in said and "step-000020/replica-1.pt" in said and "damaged" in said
    assert run_here(monkeypatch, copied.parent, "train", "--resume", "run") == 0
    said = capsys.readouterr().out
    assert "step-000020/replica-1.pt is damaged, so this run goes on from step 15" in said
    assert same_weights(run, copied, STEPS)


def test_a_checkpoint_that_another_process_removes_meanwhile_is_not_damaged(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process of an island that goes on removes later ones, of which it is told which are damaged."""
    sound = checkpoint.sound

    def removed(path: Path) -> bool:
        path.unlink()
        return sound(path)

    flip_a_bit(spoilt := checkpoint.path_of(copied, STEPS, "replica-0"))
    assert checkpoint.damaged(copied, 0) == [spoilt]
    monkeypatch.setattr(checkpoint, "sound", removed)
    assert not checkpoint.damaged(copied, 0)


def test_the_lines_of_a_run_that_goes_on_begin_where_it_does(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was told before is not told again, but what is trained again is."""
    for step in (15, 20):
        shutil.rmtree(copied / "checkpoints" / f"step-{step:06d}")
    assert run_here(monkeypatch, copied.parent, "train", "--resume", "run") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "step " in line]
    assert lines[0] == "goes on from step 10"
    told = [line.split(" · ")[0] for line in lines[1:]]
    # A slow machine tells of its progress in between, too.
    assert {"step 20", "step 20/20"} <= {*told} and all(int(one.split()[1].split("/")[0]) > 10 for one in told), lines


def test_without_a_whole_checkpoint_the_damaged_ones_are_named(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in copied.glob("checkpoints/step-*/replica-0.pt"):
        cut(path, 1000)
    for command in (["train", "--resume", "run"], ["export", "run", "model"]):
        assert run_here(monkeypatch, copied.parent, *command) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "damaged" in line and "step-000020/replica-0.pt" in line


def test_averaged_weights_that_were_cut_are_passed_over(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    cut(tmp_path / "run" / "checkpoints" / "averaged.pt", 1000)
    origin = export(tmp_path / "run", tmp_path / "model")
    assert "checkpoints at step 20" in origin and "averaged.pt" in origin and "damaged" in origin


def test_one_wrong_bit_in_a_file_is_found_where_it_is_read(run: Path, copied: Path) -> None:
    path = checkpoint.path_of(copied, STEPS, "replica-0")
    flip_a_bit(path)
    with pytest.raises(UserError, match=r"step-000020/replica-0.pt is damaged: .* or remove it"):
        checkpoint.read(path)
    shutil.copy(run / "checkpoints" / "averaged.pt", copied / "checkpoints")
    flip_a_bit(copied / "checkpoints" / "averaged.pt")
    origin = export(copied, copied.parent / "model")
    assert "checkpoints at step 15" in origin and "averaged.pt" in origin and "step-000020/replica-0.pt" in origin


def test_events_that_cannot_be_read_are_left_out(
    run: Path, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sector of noughts in the middle, another program's line, and a file cut within a line."""
    first, second = (copied / "events" / f"replica-{replica}.jsonl" for replica in (0, 1))
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join([lines[0], b"\0" * 40 + b"\n", b"[1]\n", b'{"event": 3}\n', *lines[1:]]))
    cut(second, -20)
    assert run_here(monkeypatch, copied.parent, "report", "run") == 0
    assert "replica-0.jsonl: 3 lines cannot be read" in capsys.readouterr().err
    assert "replica-0.jsonl: 3 lines cannot be read" in (copied / "report.html").read_text()
    for command in (["export", "run", "model"], ["train", "--resume", "run"]):
        assert run_here(monkeypatch, copied.parent, *command) == 0
    assert same_weights(run, copied, STEPS)
    lines = second.read_bytes().splitlines()
    assert lines and all(json.loads(line)["event"] for line in lines)


def test_what_others_put_beside_the_checkpoints_is_left_alone(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = [copied / "checkpoints" / name for name in ("step-foo", "step-²", "averaged copy.pt")]
    strange += [copied / "events" / "replica-x.jsonl", copied / "checkpoints" / "step-000020" / "replica-0-part-x.pt"]
    for path in strange:
        path.write_text("notes")
    assert "checkpoints at step 20" in export(copied, copied.parent / "model")
    assert run_here(monkeypatch, copied.parent, "train", "--resume", "run") == 0
    assert all(path.read_text() == "notes" for path in strange)


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def machines(run: Path, folder: Path, **settings: object) -> list[Path]:
    """The folders of two machines, each with one replica's files of a run of processes."""
    folders = [folder / f"machine-{number}" for number in (0, 1)]
    for number, copy in enumerate(folders):
        shutil.copytree(run, copy)
        (copy / "summary.json").unlink()
        for path in copy.glob(f"*/**/replica-{1 - number}.*"):
            path.unlink()
        text = (copy / "config.toml").read_text().replace('network = "simulated"', 'network = "torch"')
        for name, value in settings.items():
            text = "\n".join(f"{name} = {value}" if line.startswith(f"{name} =") else line for line in text.split("\n"))
        (copy / "config.toml").write_text(text)
    return folders


def train(commands: list[list[object]]) -> list[tuple[int, str]]:
    """`farflung train` on as many machines; how each ended, and what it complained of."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        Python("-m", "farflung", "train", *command, **common, RANK=str(n), GROUP_RANK=str(n), WORLD_SIZE="2")
        for n, command in enumerate(commands)
    ]
    try:
        return [(process.wait(patience(60)), process.err.read_text()) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_checkpoint_that_another_process_removes_meanwhile_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "checkpoints" / "step-000008"
    step.mkdir(parents=True)
    scanned = os.scandir

    def quicker(path: Any) -> Any:
        if Path(path) == step:
            step.rmdir()
        return scanned(path)

    monkeypatch.setattr(os, "scandir", quicker)
    checkpoint.forget_after(tmp_path, 0, 4)
    assert not step.exists()


def test_a_restart_removes_nothing_before_all_machines_have_agreed_to_it(run: Path, tmp_path: Path) -> None:
    one, other = folders = machines(run, tmp_path)
    before = [everything_in(folder) for folder in folders]
    for code, said in train([["--resume", one, "--restart"], ["--resume", other]]):
        assert code == 2 and said.strip().splitlines()[-1].endswith("give --restart on all machines or on none"), said
        assert "replica 0" in said and "would begin anew, but replica 1" in said
    assert [everything_in(folder) for folder in folders] == before
    assert [code for code, _ in train([["--resume", folder, "--restart"] for folder in folders])] == [0, 0]
    for number, folder in enumerate(folders):
        assert same_weights(run, folder, STEPS, [number]) and (folder / "summary.json").exists()
        first = json.loads((folder / "events" / f"replica-{number}.jsonl").read_text().splitlines()[0])
        assert not first["resumed"]


def test_what_another_machine_removes_while_a_run_is_cleared_is_no_fault(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looked = tmp_path / "run", list[list[Path]]()
    shutil.copytree(run, folder)

    def removed_meanwhile(where: Path) -> list[Path]:
        looked.append(event_files(where))
        shutil.rmtree(where / "events")
        return looked[-1]

    monkeypatch.setattr(beginning, "event_files", removed_meanwhile)
    beginning.clear(folder)
    assert looked[0] and not (folder / "events").exists() and not (folder / "checkpoints").exists()


def test_what_stays_of_a_run_that_is_cleared_is_told_in_time(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network drive keeps a file that somebody has open."""
    shutil.copytree(run, folder := tmp_path / "run")
    monkeypatch.setattr(events, "ENDING_SECONDS", 0.2)

    def kept(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(beginning.shutil, "rmtree", kept)
    with pytest.raises(UserError, match=r"cannot remove the old run in .*: Directory not empty"):
        beginning.clear(folder)


def test_machines_that_share_a_folder_begin_anew_together(run: Path, tmp_path: Path) -> None:
    """As on a network drive: each would remove the old run, and finds it gone."""
    folder = tmp_path / "two words"
    shutil.copytree(run, folder)
    text = (folder / "config.toml").read_text().replace('network = "simulated"', 'network = "torch"')
    (folder / "config.toml").write_text(text)
    assert [ended for ended in train([["--resume", folder, "--restart"]] * 2) if ended[0]] == []
    assert same_weights(run, folder, STEPS)
    with pytest.raises(UserError, match=f"go on with: farflung train --resume '{folder}'"):
        raise holds_a_run(folder)


def test_a_simulated_run_is_not_trained_for_real_by_torchrun(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    before = everything_in(tmp_path / "run")
    fresh = ["--network", "simulated", "--model", "micro", "--out", tmp_path / "fresh"]
    for command in (["--resume", tmp_path / "run"], fresh):
        for code, said in train([command, command]):
            assert code == 2 and said.strip().endswith("start it without torchrun")
    assert everything_in(tmp_path / "run") == before and not (tmp_path / "fresh").exists()


def test_a_restart_whose_others_never_come_removes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = machines(run, tmp_path, starting=1.0)
    before = everything_in(one)
    here = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    assert run_here(monkeypatch, tmp_path, "train", "--resume", str(one), "--restart") == 2
    assert "replica 1 of 2 has not come" in capsys.readouterr().err and everything_in(one) == before


def test_what_cannot_be_written_is_refused_in_one_line(
    run: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, disk / "run")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    before = everything_in(disk)
    for command in [
        ["train", "--resume", "disk/run", "--restart"],
        ["train", "--resume", "disk/run"],
        ["export", "disk/run", "disk/model"],
        ["report", "disk/run"],
        ["simulate", "--replicas", "4", "--params", "1e6", "--rounds", "2", "--out", "disk/simulation"],
    ]:
        assert run_here(monkeypatch, tmp_path, *command) == 2, command
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "cannot " in line and "disk/" in line and "Read-only file system; " in line
    assert everything_in(disk) == before


def test_a_disk_that_was_always_full_leaves_no_empty_folders_and_good_advice(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = Trainer._train_step

    def step(trainer: Trainer, outer: Any) -> None:
        if trainer.step == 3 and not (disk / "filler").exists():
            fill(disk)
        original(trainer, outer)
        if trainer.step == 12:
            raise StoppedError("stopped after step 12")

    with monkeypatch.context() as full:
        full.setattr(Trainer, "_train_step", step)
        command = ["train", *TWO, "--log-every", "1", "--network", "simulated", "--out", "disk/run"]
        assert run_here(full, tmp_path, *command) == 130
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "stopped after" in line]
    assert list((disk / "run").glob("checkpoints/*")) == []
    (disk / "filler").unlink()
    advice = line.partition("farflung train ")[2].split()
    assert run_here(monkeypatch, tmp_path, "train", *advice) == 0
    assert (disk / "run" / "summary.json").exists()
