"""A workload of another package, which is no language model, trained from the command line to the end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from installed import farflung_with, install_package
from processes import saved

from farflung.events import EvaluationEvent
from farflung.report.read import read_run
from farflung.training import checkpoint

STEPS = 24
SMALL = ("--workload", "regression", "--features", "6", "--replicas", "2", "--every", "4", "--steps", str(STEPS))
SMALL += ("--lr", "0.05", "--warmup", "2", "--checkpoint-every", "8", "--eval-every", "6", "--log-every", "4")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which such a package is installed."""
    return install_package(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="module")
def runs(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run, simulated and of real processes."""
    found = {}
    for network in ("simulated", "torch"):
        found[network] = tmp_path_factory.mktemp("runs") / network
        done = farflung_with(packages, "train", *SMALL, "--network", network, "--out", found[network])
        assert done.returncode == 0, done.stderr
        assert "squared error (mean of the replicas)" in done.stdout and "examples/s" in done.stdout
    return found


@pytest.mark.slow
def test_it_learns_and_is_counted_in_its_own_units(runs: dict[str, Path]) -> None:
    for folder in runs.values():
        summary = json.loads((folder / "summary.json").read_text())
        losses = [event.score for event in read_run(folder).of(0, EvaluationEvent)]
        assert summary["validation_loss_averaged"] < 0.6 * losses[0]
        assert summary["tokens"] == 2 * STEPS * 8 and summary["units"] == "examples"
        page = (folder / "report.html").read_text()
        assert "loss, squared error" in page and "nats" not in page and "tokens" not in page.split("</script>")[-1]


@pytest.mark.slow
def test_the_simulation_trains_what_real_processes_do(runs: dict[str, Path]) -> None:
    for replica in (0, 1):
        one, other = (saved(folder, STEPS, replica)["model"] for folder in runs.values())
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_and_is_exported(packages: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs["simulated"], folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:06d}")
    checkpoint.average_of(folder).unlink()
    done = farflung_with(packages, "train", "--resume", folder)
    assert done.returncode == 0, done.stderr
    for replica in (0, 1):
        one, other = (saved(f, STEPS, replica)["model"] for f in (runs["simulated"], folder))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert farflung_with(packages, "export", folder, tmp_path / "model").returncode == 0
    exported = json.loads((tmp_path / "model" / "weights.json").read_text())
    averaged = checkpoint.read(checkpoint.average_of(folder))["model"]
    assert all(torch.equal(torch.tensor(exported[name]), averaged[name]) for name in averaged)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "regresion"], "there is no workload 'regresion'; did you mean 'regression'?"),
        (["--workload", "regression", "--model", "tiny"], "--model"),
        (["--workload", "regression", "--features", 0], "features is 0; it must be at least 1"),
        (["--workload", "regression", "--stages", 2], "Regression cannot be divided; leave out --stages"),
    ],
)
def test_what_it_cannot_is_refused(packages: Path, arguments: list[object], words: str, tmp_path: Path) -> None:
    done = farflung_with(packages, "train", *arguments, "--out", tmp_path / "run")
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and words in line, line


@pytest.mark.slow
def test_its_settings_are_in_the_help_and_in_the_file(packages: Path, runs: dict[str, Path]) -> None:
    shown = farflung_with(packages, "train", "--workload", "regression", "--help-all").stdout
    assert "--examples" in shown and "--sequence-length" not in shown
    written = (runs["torch"] / "config.toml").read_text()
    assert 'workload = "regression"' in written and "[workload]\nfeatures = 6\nexamples = 256\n" in written
