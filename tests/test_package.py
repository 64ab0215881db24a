"""A package of a user's own, installed by pip: its method, codec, network and workload are as good as farflung's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import farflung_with, install_package

from farflung.events import EvaluationEvent, RoundEvent
from farflung.report.read import read_run

COMMAND = ("train", "--workload", "regression", "--features", "6", "--replicas", "4", "--steps", "24", "--lr", "0.05")
COMMAND += ("--every", "4", "--warmup", "2", "--eval-every", "6", "--log-every", "4", "--inner", "adamw")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_package(tmp_path_factory.mktemp("package"))


def test_all_four_train_together(package: Path, tmp_path: Path) -> None:
    seconds = {}
    for network in ("simulated", "bay"):
        theirs = ("--method", "ring", "--codec", "places4", "--network", network, "--out", tmp_path / network)
        done = farflung_with(package, *COMMAND, *theirs)
        assert done.returncode == 0, done.stderr
        run = read_run(tmp_path / network)
        rounds = run.of(0, RoundEvent)
        groups = [tuple(round.group) for round in rounds]
        assert groups == [(0, 3), (0, 1), (0, 3), (0, 1), (0, 3), (0, 1)], groups
        assert all(round.outcome == "averaged" and 0 < round.compression_error < 0.01 for round in rounds)
        # The net has 6 x 16 + 16 weights in one layer, and 17 in the other: two bytes each, and a header.
        assert all(258 <= round.bytes_sent < 258 + 100 for round in rounds[1:])
        losses = [event.validation_loss for event in run.of(0, EvaluationEvent)]
        assert losses[-1] < 0.6 * losses[0]
        seconds[network] = json.loads((tmp_path / network / "summary.json").read_text())["seconds"]
    assert seconds["bay"] - seconds["simulated"] == pytest.approx(7, abs=0.5), "the start and six rounds"


def test_they_are_listed_and_planned_beside_ours(package: Path) -> None:
    listed = farflung_with(package, "methods").stdout
    assert "ring" in listed and "places2, places3" in listed, listed
    simulated = farflung_with(package, "simulate", "--methods", "ring,noloco", "--params", "1e6", "--replicas", "4")
    assert simulated.returncode == 0 and "ring" in simulated.stdout, simulated.stderr


def test_a_setting_of_their_method_reaches_the_command_line(package: Path) -> None:
    shown = farflung_with(package, "train", "--method", "ring", "--help").stdout
    assert "--pull" in shown
    done = farflung_with(package, "train", "--method", "ring", "--gamma", "1")
    assert done.returncode == 2 and "ring has no setting gamma" in done.stderr
