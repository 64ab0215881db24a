"""A run on the internet as users meet it: real processes of the command line, on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from patience import patience, until
from processes import farflung, run_here
from swarm import SETTINGS, Swarm

from farflung.events import JoinedEvent, StartEvent, StepEvent, WarningEvent
from farflung.networks.internet import Identity, Ticket, read_ticket
from farflung.training import checkpoint
from farflung.training.events import EventLog


@pytest.mark.slow
def test_a_bootstrap_invites_peers_meet_leave_and_come_back_and_onlookers_see_it(swarm: Swarm) -> None:
    arguments = ("invite", "--name", "test", "--ticket", "given.ticket", "--port", swarm.port, *SETTINGS)
    bootstrap = swarm.start(*arguments, "--steps", 100_000, log="bootstrap")
    ticket = swarm.folder / "given.ticket"
    until(lambda: "the ticket is in given.ticket" in swarm.said("bootstrap"))
    assert read_ticket(ticket).settings["model"] == "micro" and ticket.stat().st_mode & 0o077 == 0
    assert not swarm.told("bootstrap")
    one = swarm.join("one", ticket=ticket.name)
    until(lambda: swarm.step("one") > 5)
    status = ("status", ticket, "--once", "--listen", "127.0.0.1")
    until(lambda: "1 peer in training" in farflung(*status).stdout)
    swarm.join("two", ticket=ticket.name)
    until(lambda: swarm.averaged("one") > 1 and swarm.averaged("two") > 1)
    assert swarm.events("two", JoinedEvent), "it has fetched the state of the other"

    def seen() -> bool:  # records are a beat old
        told = farflung(*status, COLUMNS="160")
        assert told.returncode == 0, told
        return "2 peers in training" in told.stdout and "bootstrap" in told.stdout

    until(seen)
    found = farflung("doctor", ticket, "--listen", "127.0.0.1")
    assert found.returncode == 0 and found.stdout.count("there and back") == 3, found

    one.send_signal(signal.SIGINT)
    assert one.wait(patience(60)) == 130
    said, left_at = swarm.said("one"), swarm.step("one")
    kept = f"its last checkpoint is of step {left_at}; "
    assert f"{kept}come back with: farflung join one/run.ticket --out one" in said, said
    bootstrap.send_signal(signal.SIGINT)
    assert bootstrap.wait(patience(30)) == 0
    swarm.join("one", ticket="two/run.ticket")  # the bootstrap is gone
    until(lambda: swarm.step("one") > left_at + 20)


@pytest.mark.slow
def test_one_with_first_beside_others_that_train_takes_their_state_before_it_trains(swarm: Swarm) -> None:
    swarm.invite()
    until(lambda: swarm.step("first") > 50)
    swarm.join("two", "--first")
    until(lambda: swarm.averaged("two") > 0)
    assert swarm.events("two", JoinedEvent)
    assert not [
        one.message for one in warnings_of(swarm, "first") + warnings_of(swarm, "two") if "sat out" in one.message
    ]
    until(lambda: len(swarm.events("two", StepEvent)) >= 3)
    begun, learnt = ([step.loss for step in swarm.events(name, StepEvent)] for name in ("two", "first"))
    halfway = (fmean(learnt[:3]) + fmean(learnt[30:50])) / 2  # a batch is but 64 bytes, of which some are hard
    assert fmean(begun[:3]) < halfway, "it has not begun with random weights"


@pytest.mark.slow
def test_the_command_that_a_peer_alone_is_given_goes_on_and_one_without_first_names_it(swarm: Swarm) -> None:
    first = swarm.invite()
    until(lambda: checkpoint.whole_steps(swarm.folder / "first"))
    first.send_signal(signal.SIGINT)
    assert first.wait(patience(60)) == 130
    command = swarm.said("first").rpartition("come back with: farflung ")[2].strip()
    assert command.startswith("join first/run.ticket --out first ") and command.endswith(" --first"), command
    left_at = swarm.step("first")

    for number, arguments in enumerate(([], ["--out", "first"])):
        log = f"without-{number}"
        without = swarm.start("join", "first/run.ticket", *arguments, "--deadline", 1, log=log)
        assert without.wait(patience(60)) == 2
        listening = "--deadline 1.0 --listen 127.0.0.1 --first"
        told = f"go on from the checkpoint in first with: farflung join first/run.ticket --out first {listening}"
        assert told in swarm.said(log), swarm.said(log)
    away = swarm.start("join", "run.ticket", "--out", "new", "--deadline", 1, log="away")
    assert away.wait(patience(60)) == 2
    assert "begin the run again here with: farflung join run.ticket --out new " in swarm.said("away")

    swarm.start(*command.split(), log="first")
    until(lambda: swarm.step("first") > left_at + 20)


@pytest.mark.slow
def test_peers_of_one_name_are_told_apart_where_they_are_shown(swarm: Swarm) -> None:
    swarm.invite("--as", "alice")
    for name in ("one", "two"):
        swarm.join(name, "--as", "gpu-box")
    until(lambda: all(swarm.averaged(name) for name in ("one", "two")))
    status = ("status", swarm.folder / "run.ticket", "--once", "--listen", "127.0.0.1")

    def shown() -> list[str]:
        told = farflung(*status, COLUMNS="80").stdout.splitlines()
        return sorted(re.split("  +", line)[0] for line in told if " trains " in line)

    until(lambda: len(shown()) == 3)
    alice, *others = shown()
    assert alice == "alice" and len({*others}) == 2
    assert all(re.fullmatch(r"gpu-box \(\w{3}\)", other) for other in others), others
    until(lambda: re.search(r"2 other peers · alice at step \d+.* · gpu-box \(\w{3}\) at step", swarm.said("one")))


@pytest.mark.slow
def test_the_first_peer_is_killed_and_the_run_goes_on(swarm: Swarm) -> None:
    first = swarm.invite()
    until(lambda: "others on this machine can read the ticket's file; give it with --ticket" in swarm.said("first"))
    swarm.join("two")
    swarm.join("three")
    until(lambda: swarm.averaged("two") > 0 and swarm.averaged("three") > 0)
    first.kill()
    began = {name: swarm.step(name) for name in ("two", "three")}
    swarm.join("four", ticket="two/run.ticket")
    until(lambda: swarm.averaged("four") > 0)
    assert all(swarm.step(name) > step > 0 for name, step in began.items())
    for name in ("two", "three"):
        counted = [event.tokens for event in swarm.events(name, StepEvent)]
        assert all(b - a >= 64 for a, b in pairwise(counted)), "no step of a survivor is lost or repeated"

    swarm.join("first", "--port", swarm.port, ticket="two/run.ticket")
    started = len(swarm.events("first", StartEvent))
    until(lambda: len(swarm.events("first", StartEvent)) > started or swarm.step("first") > began["two"])
    until(lambda: swarm.step("first") > began["two"])


@pytest.mark.slow
def test_a_peer_that_stood_still_comes_back_by_itself(swarm: Swarm) -> None:
    swarm.invite()
    two = swarm.join("two")
    swarm.join("three")
    until(lambda: swarm.averaged("two") > 0 and swarm.averaged("three") > 0)
    two.send_signal(signal.SIGSTOP)
    before = swarm.step("three")
    until(lambda: swarm.step("three") > before + 40)  # four rounds, to which it did not come
    stood_at, met = swarm.step("two"), swarm.averaged("two")
    two.send_signal(signal.SIGCONT)
    until(lambda: swarm.averaged("two") > met)
    assert swarm.step("two") > stood_at
    assert two.poll() is None


@pytest.mark.slow
def test_a_finished_run_has_a_summary_a_report_and_weights_to_export(swarm: Swarm) -> None:
    first = swarm.invite("--eval-every", 500, "--checkpoint-every", 500, steps=600)
    two = swarm.join("two", "--as", "bob")
    assert first.wait(patience(60)) == 0 and two.wait(patience(60)) == 0, swarm.said("two")
    told = swarm.said("first").partition("validation loss")[2]
    assert "(this peer, " in told and re.search(r"^ +bob +step \d+, loss [\d.]+, \d+ rounds?", told, re.MULTILINE), told
    assert "mean of the replicas" not in told and "distance 0" not in swarm.said("first")
    for name in ("first", "two"):
        summary = json.loads((swarm.folder / name / "summary.json").read_text())
        assert summary["steps"] == 600 and summary["validation_loss"] < 5 and summary["missing"] == []
        assert (swarm.folder / name / "report.html").exists()
    exported = farflung("export", swarm.folder / "two", swarm.folder / "model")
    assert exported.returncode == 0, exported.stderr
    assert (swarm.folder / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk can only be mounted by root")
def test_a_full_disk_is_told_and_training_goes_on_with_the_last_checkpoint_whole(swarm: Swarm) -> None:
    disk = swarm.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        swarm.invite("--out", "disk/run")
        until(lambda: checkpoint.whole_steps(disk / "run"))
        (disk / "filler").write_bytes(bytes(4_000_000)) if free(disk) > 4_100_000 else fill(disk)
        fill(disk)
        until(lambda: any("no checkpoint of step" in e.message for e in warnings_of(swarm, "disk/run")))
        whole = checkpoint.whole_steps(disk / "run")
        assert whole and swarm.processes[0].poll() is None
        (disk / "filler").unlink()
        until(lambda: checkpoint.whole_steps(disk / "run")[0] > whole[0])
    finally:
        for process in swarm.processes:
            process.kill()
            process.wait()
        subprocess.run(["umount", str(disk)], check=True)


def warnings_of(swarm: Swarm, name: str) -> list[WarningEvent]:
    return swarm.events(name, WarningEvent)


def free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def fill(folder: Path) -> None:
    """Leaves no more than a little for a file of events."""
    with (folder / "filler").open("ab") as file:
        file.write(bytes(max(0, free(folder) - 200_000)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "none.ticket"], ["none.ticket", "give the path of a ticket"]),
        (["join"], ["TICKET"]),
        (["invite"], ["--name"]),
        (["invite", "--name", "../x"], ["--name is '../x'", "choose one"]),
        (["invite", "--name", "x", "--stages", 2], ["each peer's own", "give them to farflung join"]),
        (["invite", "--name", "x", "--islands", "1x1 1x1"], ["islands is for farflung train"]),
        (["invite", "--name", "x", "--offload"], ["leave out --offload"]),
        (["invite", "--name", "x", "--conditions", "home"], ["conditions are for the simulated network"]),
        (["invite", "--name", "x", "--network", "simulated"], ["network is 'simulated'", "leave it out"]),
        (["invite", "--name", "x", "--replicas", 8], ["replicas is 8", "leave it out"]),
        (["invite", "--name", "x", "--latency-ms", 80], ["--latency-ms is 80.0"]),
        (["invite", "--name", "x", "--train", "--method", "dilocox"], ["use nolocox", "add --adapt False"]),
        (["doctor", "x", "--once"], ["--once"]),
        (["invite", "--name", "x", "--as", "a b"], ["--as is 'a b'", "letters, digits"]),
        (["invite", "--name", "x", "--listen", "1.2.3.4"], ["1.2.3.4", "an address of this machine"]),
        (["invite", "--name", "x", "--train", "--method", "ddp"], ["needs all replicas at every step"]),
        (["invite", "--name", "x", "--method", "dynamic-threshold"], ["needs all replicas at every step"]),
        (["invite", "--name", "x", "--shares", "apart"], ["the number of replicas is not known"]),
        (["invite", "--name", "x", "--every-final", 90], ["rounds must be equally far apart"]),
        (["train", "--network", "internet"], ["farflung invite", "farflung join"]),
        (["train", "--robust", "median"], ["only peers on the internet need it"]),
    ],
)
def test_a_mistake_gets_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[object],
    words: list[str],
) -> None:
    listen = [] if "--listen" in arguments or arguments[0] == "train" else ["--listen", "127.0.0.1"]
    assert run_here(monkeypatch, tmp_path, *map(str, arguments), *listen) == 2
    told = capsys.readouterr().err
    lines = [line for line in told.splitlines() if line.startswith("farflung: ")]
    assert all(word in lines[-1] for word in words), told


def test_the_folder_of_a_peer_that_trains_is_refused_before_anybody_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Ticket.new("test", {"model": "micro", "batch_size": 2}).write(tmp_path / "run.ticket")
    Identity(tmp_path / "out" / "peer.key")
    log = EventLog(tmp_path / "out", 1, "replica-1", time.monotonic)
    arguments = ("join", "run.ticket", "--out", "out", "--listen", "127.0.0.1")
    assert run_here(monkeypatch, tmp_path, *arguments) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "run folder" not in line]
    assert line.startswith(f"farflung: out is being trained by another process (number {os.getpid()} on "), line
    log.close()


def test_a_peer_that_does_not_come_to_train_leaves_folders_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another run's lines are not shown either, nor is a key left in its folder."""
    Ticket.new("test", {"model": "micro"}).write(tmp_path / "run.ticket")
    (events := tmp_path / "foreign" / "events").mkdir(parents=True)
    start = {"event": "start", "replica": 0, "at": 0.0, "step": 0, "method": "noloco", "steps": 9, "replicas": 1}
    warning = {"event": "warning", "replica": 0, "at": 1.0, "step": 5, "message": "of old"}
    (events / "replica-0.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(warning)}\n")
    (tmp_path / "mine").mkdir()
    before = set(tmp_path.rglob("*"))
    for out, listen, words in [
        ("foreign", "127.0.0.1", "holds another peer's run"),
        ("mine", "1.2.3.4", "an address of this machine"),
        ("new", "1.2.3.4", "an address of this machine"),
    ]:
        assert run_here(monkeypatch, tmp_path, "join", "run.ticket", "--out", out, "--listen", listen) == 2
        told = capsys.readouterr()
        assert words in told.err and "of old" not in told.err + told.out
        assert set(tmp_path.rglob("*")) == before, out


@pytest.mark.slow
def test_a_peer_that_is_ended_while_it_starts_leaves_nothing(swarm: Swarm) -> None:
    first = swarm.start("invite", "--name", "test", "--train", *SETTINGS, "--out", "first", log="first")
    until(lambda: (swarm.folder / "first" / "peer.key").exists())
    first.send_signal(signal.SIGTERM)
    assert first.wait(patience(60)) == 130
    assert "Traceback" not in swarm.said("first")
    assert (swarm.folder / "first" / "events").exists() or not (swarm.folder / "first").exists()


def test_a_new_run_in_a_peers_folder_is_told_how_the_peer_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "two words"
    identity = Identity(folder / "peer.key")
    EventLog(folder, identity.rank, f"replica-{identity.rank}", time.monotonic).close()
    assert run_here(monkeypatch, tmp_path, "train", "--model", "micro", "--out", folder.name) == 2
    assert capfd.readouterr().err.endswith("or go on with: farflung join 'two words/run.ticket' --out 'two words'\n")


@pytest.mark.slow
def test_a_read_only_folder_and_another_runs_folder_are_refused(swarm: Swarm) -> None:
    swarm.invite()
    read_only = farflung("join", swarm.folder / "run.ticket", "--out", "/proc/x", "--listen", "127.0.0.1")
    assert read_only.returncode == 2 and "choose another folder" in read_only.stderr, read_only
    other = swarm.folder / "other"
    other.mkdir()
    ticket = read_ticket(swarm.folder / "run.ticket")
    type(ticket).new("another", {}).write(other / "run.ticket")
    refused = farflung("join", swarm.folder / "run.ticket", "--out", other, "--listen", "127.0.0.1")
    assert refused.returncode == 2 and "holds another run" in refused.stderr, refused


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "doctor"])
def test_who_looks_at_a_run_that_is_gone_gives_up_soon_in_one_line(swarm: Swarm, command: str) -> None:
    node = swarm.start("invite", "--name", "gone", "--port", swarm.port, "--ticket", "run.ticket", log="node")
    until(lambda: (swarm.folder / "run.ticket").exists())
    node.kill()
    node.wait()
    found = farflung(command, swarm.folder / "run.ticket", "--listen", "127.0.0.1")
    lines = [line for line in (found.stdout + found.stderr).splitlines() if "ticket to gone" not in line]
    assert found.returncode and len(lines) == 1, lines
    assert "where nobody has answered for 20 s; the run may be over; if not, ask a peer" in lines[0]
