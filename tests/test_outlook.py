"""What farflung train --dry-run says is what the run then does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from processes import SMALL, run_here

from farflung.planner import outlook


def test_a_dry_run_tells_what_the_run_then_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*map(str, SMALL), "--replicas", "2", "--steps", "20", "--every", "5", "--network", "simulated"]
    assert run_here(monkeypatch, tmp_path, "train", *flags, "--dry-run") == 0
    told = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-1])
    assert list(told) == ["model", "replicas", "trained on", "rounds", "memory", "time"] and not [*tmp_path.iterdir()]
    assert run_here(monkeypatch, tmp_path, "train", *flags, "--out", "run") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f", {summary['parameters']:,} parameters" in told["model"]
    assert told["trained on"].startswith(f"{summary['tokens']:,} tokens")
    assert told["rounds"].startswith(f"{summary['rounds']} of noloco, each 5 steps")
    in_all = float(re.findall(r"([\d.,]+) MB in all", told["rounds"])[0])
    # Beside messages, what replicas tell each other about rounds is sent.
    assert 0.9 * summary["bytes_sent"] / 2 < 1e6 * in_all <= 1.01 * summary["bytes_sent"] / 2, summary

    resume = ["train", "--resume", "run", "--steps", "40"]
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, *resume, "--dry-run") == 0
    assert "40 steps of" in capsys.readouterr().out
    assert run_here(monkeypatch, tmp_path, *resume, "--print-config") == 0
    assert "steps = 40\n" in capsys.readouterr().out
    assert "steps = 20\n" in (tmp_path / "run" / "config.toml").read_text(), "nothing was changed"
    assert run_here(monkeypatch, tmp_path, "train", "--resume", "run") == 0  # which ends at once, at step 20
    assert run_here(monkeypatch, tmp_path, *resume) == 0
    assert "step 40/40" in capsys.readouterr().out


def test_a_simulated_run_by_the_clock_takes_as_long_as_its_steps_and_not_as_its_clock_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(outlook, "_flops_per_second", lambda *_: 1e7)
    flags = [*SMALL, "--replicas", "2", "--every", "50s", "--rounds", "20", "--network", "simulated"]
    units, took = {"s": 1, "min": 60, "h": 3600, "day": 86400, "days": 86400}, []
    for step_ms in ("100", "50"):
        assert run_here(monkeypatch, tmp_path, "train", *flags, "--step-ms", step_ms, "--dry-run") == 0
        told = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-1])
        assert told["replicas"] == "2, in one process"
        time, words = told["time"].split(" or more for the steps of ")
        assert words.startswith("16 min 40 s of the simulated clock, all on this machine's cpu")
        took.append(sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+) ([a-z]+)", time)))
    assert took[1] == pytest.approx(2 * took[0], rel=0.02)


def test_a_simulated_run_needs_the_memory_of_all_its_replicas(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    needed = []
    for replicas in ("1", "8"):
        flags = [*SMALL, "--model", "small", "--replicas", replicas, "--network", "simulated", "--dry-run"]
        assert run_here(monkeypatch, tmp_path, "train", *flags) == 0
        needed += re.findall(r"^memory\s+([\d.]+) GB", capsys.readouterr().out, re.MULTILINE)
    assert float(needed[1]) - 1 == pytest.approx(8 * (float(needed[0]) - 1), rel=0.1)  # 1 GB is the runtime's
