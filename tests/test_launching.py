"""How runs are started, with the oldest torch, too: as processes of torch's launcher, each on its device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import SMALL, run_here, saved

from farflung.training.launch import pick_device


@pytest.mark.parametrize("replicas", [1, 2])
def test_processes_are_launched_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int) -> None:
    shape = ["--network", "torch", "--replicas", str(replicas), "--steps", "2", "--every", "1"]
    assert run_here(monkeypatch, tmp_path, "train", *SMALL, *shape, "--out", "run") == 0
    assert all(saved(tmp_path / "run", 2, replica)["model"] for replica in range(replicas))


def test_a_machines_gpus_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("auto", "cuda"):
        assert [pick_device(name, rank).index for rank in range(3)] == [0, 1, 0]
