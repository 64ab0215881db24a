"""Peers on the internet that are islands of several processes: they train as one, and come back when one dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from patience import patience, until
from processes import farflung, run_here
from swarm import Swarm
from warm import Python

from farflung.events import JoinedEvent, RoundEvent, StartEvent
from farflung.networks.internet import Ticket
from farflung.testing.hosts import processes_of, torch_rendezvous
from farflung.training import checkpoint
from farflung.training.resharding import whole_weights

DILOCO = ("--method", "diloco", "--inner", "adamw", "--batch-size", 4)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    made = Swarm(tmp_path)
    yield made
    running = [process for process in made.processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)  # a launcher then ends its island's processes
    for process in running:
        process.wait(patience(60))


def weights(swarm: Swarm, name: str) -> dict[str, torch.Tensor]:
    return whole_weights(checkpoint.averages(swarm.folder / name))


@pytest.mark.slow
@pytest.mark.parametrize("gateway", [False, True], ids=["keeper to keeper", "gateway"])
def test_an_island_is_a_member_like_others_and_keeps_up_with_them(swarm: Swarm, gateway: bool) -> None:
    rarely = ("--eval-every", 5000, "--checkpoint-every", 500)
    first = swarm.invite(*DILOCO, "--batch-size", 96, *rarely, steps=120)  # so slow that the other comes in time
    island = swarm.join("island", "--stages", 2, "--shard", 2, "--batch-size", 8, *(["--gateway"] if gateway else []))
    until(lambda: swarm.averaged("island") > 1, 120)
    status = ("status", swarm.folder / "run.ticket", "--once", "--listen", "127.0.0.1")
    until(lambda: re.search(r" trains .* 4 *$", farflung(*status, COLUMNS="160").stdout, re.MULTILINE))
    assert swarm.events("island", JoinedEvent), "it has fetched the state of the other"
    assert first.wait(patience(120)) == 0 and island.wait(patience(120)) == 0, swarm.said("island")
    both = [weights(swarm, name) for name in ("first", "island")]
    assert both[0].keys() == both[1].keys()
    flat = [torch.cat([one[name].flatten() for name in both[0]]) for one in both]
    apart = torch.linalg.vector_norm(flat[0] - flat[1]) / torch.linalg.vector_norm(flat[0])
    assert apart < 0.1, "no further than a few steps of their own, after the last round that they held together"
    sent, own = (
        max(e.bytes_sent for e in swarm.events(name, RoundEvent) if e.outcome == "averaged")
        for name in ("first", "island")
    )
    assert sent == own if gateway else 0 < own < sent / 2, "what the first process keeps, or all that there is"
    report = (swarm.folder / "island" / "report.html").read_text()
    assert "stage 1" in report and "shard 1" in report


@pytest.mark.slow
@pytest.mark.parametrize(("process", "gateway"), [(0, ()), (1, ("--gateway",))])
def test_a_process_of_an_island_dies_and_the_island_comes_back(
    swarm: Swarm, process: int, gateway: tuple[str, ...]
) -> None:
    swarm.invite(*DILOCO)
    island = swarm.join("island", "--stages", 2, "--checkpoint-every", 20, *gateway)
    until(lambda: swarm.averaged("island") > 0 and checkpoint.whole_steps(swarm.folder / "island"), 120)
    parts = processes_of(swarm.folder / "island")
    assert len(parts) == 2
    os.kill(parts[process], signal.SIGKILL)
    until(lambda: "the island is started again (1 of 3)" in swarm.said("island"), 120)
    assert f"stage {process} of replica 0 failed: it died of signal 9" in swarm.said("island")
    starts, before = len(swarm.events("island", StartEvent)), swarm.step("first")
    until(lambda: len(swarm.events("island", StartEvent)) > starts or swarm.step("island") > before, 120)
    until(lambda: swarm.step("island") > before, 120)
    island.send_signal(signal.SIGINT)
    assert island.wait(patience(120)) == 130
    assert "come back with: farflung join island/run.ticket --out island" in swarm.said("island")


@pytest.mark.slow
def test_an_island_comes_back_with_a_gateway_and_without(swarm: Swarm) -> None:
    swarm.invite("--every", 10, "--delay", 5, "--codec", "ef-int8", "--inner", "adamw", "--batch-size", 4)
    shape = ("--shard", 2, "--checkpoint-every", 10, "--first")
    for gateway in ((), ("--gateway",), ()):
        before, met = swarm.step("island"), swarm.averaged("island")
        island = swarm.join("island", *shape, *gateway)
        until(lambda: island.poll() is not None or swarm.averaged("island") > met + 1, 120)  # noqa: B023
        assert island.poll() is None and swarm.step("island") > before, swarm.said("island")
        island.send_signal(signal.SIGINT)
        assert island.wait(patience(120)) == 130, swarm.said("island")
        assert checkpoint.whole_steps(swarm.folder / "island")


@pytest.mark.slow
def test_an_island_that_is_stopped_before_it_joins_is_told_a_command_that_there_is(swarm: Swarm) -> None:
    Ticket.new("test", {"model": "micro", "batch_size": 4, "inner": "adamw"}).write(swarm.folder / "run.ticket")
    island = swarm.join("island", "--stages", 2)
    until(lambda: list(swarm.folder.glob("island/logs/*/*/*/*/stderr.log")))
    island.send_signal(signal.SIGINT)
    assert island.wait(patience(120)) == 130
    (told,) = re.findall("come back with: farflung join (.*)", swarm.said("island"))
    assert told == "run.ticket --out island --stages 2 --listen 127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", 3], ["--batch-size is 2, which 1 shard × 6 microbatches do not divide"]),
        (["--stages", 40, "--batch-size", 80], ["40 pieces", "layers"]),
        (["--shard", 2, "--boundary", "int8"], ["one stage has no boundary"]),
        (["--stages", 2, "--batch-size", 4, "--boundary", "subspace4"], ["peers differ in them"]),
        (["--gateway"], ["gateway is for a peer of several processes"]),
        (
            ["--shard", 2, "--announce", "/ip4/203.0.113.7/tcp/4001"],
            ["each process of an island has its own", "--gateway"],
        ),
        (
            ["--stages", 2, "--batch-size", 4, "--port", 65535],
            ["port is 65535, but this peer needs 2 ports", "a --port of at most 65534, or add --gateway"],
        ),
        (
            ["--stages", 2, "--batch-size", 4, "--gateway", "--port", 65536],
            ["port is 65536, but this peer needs 1 port", "a --port of at most 65535\n"],
        ),
    ],
)
def test_layouts_that_cannot_work_are_refused_before_anything_starts(
    arguments: list[object],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    Ticket.new("test", {"model": "micro", "batch_size": 2, "inner": "adamw"}).write(tmp_path / "run.ticket")
    assert run_here(monkeypatch, tmp_path, "join", "run.ticket", "--out", "out", *map(str, arguments)) == 2
    told = capfd.readouterr().err
    assert not (tmp_path / "out").exists() and all(word in told for word in words), told


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (
            ["join", "run.ticket"],
            "say how they divide the model with --stages or --shard, or start it without torchrun",
        ),
        (["invite", "--name", "test", "--train", "--model", "micro", "--steps", "1"], "start it without torchrun"),
    ],
)
def test_a_peer_of_one_process_is_not_each_of_several_that_torchrun_has_started(
    arguments: list[str],
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    Ticket.new("test", {"model": "micro", "batch_size": 2, "inner": "adamw"}).write(tmp_path / "run.ticket")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_here(monkeypatch, tmp_path, *arguments, "--out", "out", "--listen", "127.0.0.1") == 2
    told = capfd.readouterr().err
    assert told == f"farflung: torchrun has started 2 processes, and this peer is one; {remedy}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_that_disagree_about_the_ticket_are_told_how(tmp_path: Path) -> None:
    tickets = [Ticket.new(name, {"model": "micro", "batch_size": 4, "inner": "adamw"}) for name in ("here", "there")]
    common = {**torch_rendezvous(2), "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank, ticket in enumerate(tickets):
        ticket.write(tmp_path / f"{ticket.name}.ticket")
        arguments = ("join", tmp_path / f"{ticket.name}.ticket", "--stages", 2, "--out", tmp_path / f"out-{rank}")
        processes.append(Python("-m", "farflung", *arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)))
    for process in processes:
        _, errors = process.communicate(timeout=patience(60))
        assert process.returncode == 2
        assert "process 1 of the island has another ticket (of there) than process 0 (of here)" in errors


@pytest.mark.slow
def test_processes_that_disagree_about_settings_are_told_which(tmp_path: Path) -> None:
    Ticket.new("here", {"model": "micro", "batch_size": 4, "inner": "adamw"}).write(tmp_path / "run.ticket")
    common = {**torch_rendezvous(2), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        Python(
            *("-m", "farflung", "join", tmp_path / "run.ticket", "--stages", 2, "--out", tmp_path / f"out-{rank}"),
            *("--microbatches", microbatches),
            **{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, microbatches in enumerate((2, 4))
    ]
    for process in processes:
        _, errors = process.communicate(timeout=patience(60))
        assert process.returncode == 2
        assert "--microbatches is 2 for process 0 and 4 for process 1" in errors
    assert not (tmp_path / "out-0").exists()
