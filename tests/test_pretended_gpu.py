"""Runs on a device that is not the host's memory, with every byte between processes brought there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from patience import patience
from processes import HERE, SMALL
from swarm import Swarm
from warm import Python

from farflung.events import RoundEvent, StepEvent
from farflung.testing.hosts import torch_rendezvous

pytestmark = pytest.mark.slow

RUNS = {
    "stages": "4 --replicas 2 --method noloco --every 2 --stages 2 --microbatches 2 --routes random "
    "--boundary subspace8-int8",
    "schedules": "2 --replicas 1 --method local --stages 2 --microbatches 2 --pipeline-schedule zero-bubble "
    "--model tiny",
    "rounds": "2 --replicas 2 --method noloco --every 2 --delay 1 --codec modulo4",
    "adapting": "2 --replicas 2 --method dilocox --every 2",
    "means": "2 --replicas 2 --method ddp",
}


def trained(folder: Path, device: str, processes: int, *flags: str) -> list[Python]:
    """The ended processes of a run on a device."""
    common = {**torch_rendezvous(processes), "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        "train",
        *SMALL,
        "--steps",
        "6",
        "--log-every",
        "1",
        "--inner",
        "adamw",
        *flags,
        "--device",
        device,
        "--out",
        folder,
    ]
    ranks = [
        Python(HERE / "pretend_gpu.py", *command, **common, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(processes)
    ]
    try:
        for rank in ranks:
            rank.wait(patience(100))
    finally:
        for rank in ranks:
            rank.kill()
    return ranks


def losses(folder: Path) -> list[float]:
    told = [json.loads(line) for line in (folder / "events" / "replica-0.jsonl").read_text().splitlines()]
    return [event[key] for event in told for key in ("loss", "score") if event.get(key) is not None]


@pytest.mark.parametrize("run", RUNS)
def test_what_is_learnt_on_a_gpu_is_what_is_learnt_on_the_host(tmp_path: Path, run: str) -> None:
    processes, *flags = RUNS[run].split()
    for device in ("gpu", "cpu"):
        ranks = trained(tmp_path / device, device, int(processes), *flags)
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(r.err.read_text() for r in ranks)
    found = losses(tmp_path / "gpu")
    assert len(found) >= 7 and found == pytest.approx(losses(tmp_path / "cpu"), rel=1e-4)


def test_peers_of_a_swarm_train_on_gpus_and_meet(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path, HERE / "pretend_gpu.py")
    stages = ["--swarm", "--stages", "2", "--boundary", "subspace8-int8", "--microbatches", "2", "--codec", "modulo4"]
    peers = [swarm.invite("--method", "noloco", "--device", "gpu", *stages, "--every", "4", steps=24)]
    try:
        peers += [swarm.join(name, "--device", "gpu") for name in ("second", "third")]
        for peer in peers:
            assert peer.wait(patience(150)) == 0, peer.err.read_text()
    finally:
        for peer in peers:
            peer.kill()
    rounds = [event.outcome for name in ("first", "second", "third") for event in swarm.events(name, RoundEvent)]
    assert rounds.count("averaged") >= 2
    told = [event.loss for event in swarm.events("first", StepEvent) if event.loss is not None]
    assert len(told) > 4 and told[-1] < told[0] - 0.5


def test_shards_that_would_share_a_gpu_are_refused_in_a_line(tmp_path: Path) -> None:
    ranks = trained(tmp_path / "run", "gpu", 2, "--replicas", "1", "--method", "local", "--shard", "2")
    for rank in ranks:
        assert rank.returncode == 2
        assert "2 shards of one stage would share gpu of " in rank.err.read_text()
        assert "give fewer with --shard, or compute with --device cpu" in rank.err.read_text()
