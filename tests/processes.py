"""Starting real processes in tests, each with a deadline; none is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patience
from patience import until as until
from warm import Python

from farflung import cli
from farflung.settings import Settings
from farflung.testing.hosts import free_port as free_port
from farflung.testing.hosts import torch_rendezvous
from farflung.training import checkpoint, launch

HERE = Path(__file__).parent


PACE = ["--eval-every", "10", "--log-every", "5", "--checkpoint-every", "5", "--warmup", "2"]
"""What a run of few steps does between them."""

SMALL = [
    "--model",
    "micro",
    "--batch-size",
    "2",
    "--sequence-length",
    "16",
    "--eval-sequences",
    "2",
    *PACE,
    "--max-tokens",
    "100000",
]
"""A run whose steps take milliseconds."""


SIMULATED: dict[str, Any] = {
    "network": "simulated",
    "replicas": 2,
    "model": "micro",
    "batch_size": 2,
    "sequence_length": 16,
    "eval_sequences": 4,
    "max_tokens": 60_000,
    "warmup": 2,
    "device": "cpu",
}
"""A run of two replicas in this process."""


def trained_here(folder: Path, resume: bool = False, **settings: Any) -> None:
    """Trains simulated replicas in this process."""
    config = Settings.of(**settings, out=str(folder))
    launch.prepare(config, folder, resume)
    launch.run_simulated(config, folder, resume)


def simulated_run(folder: Path, resume: bool = False, **settings: Any) -> None:
    """Trains in this process, with SIMULATED where nothing else is given."""
    trained_here(folder, resume, **SIMULATED | settings)


def run_together(count: int, *arguments: object, may_die: frozenset[int] = frozenset()) -> None:
    """Runs Python in some processes with the variables that torchrun would give them, without a launcher."""
    common = {**torch_rendezvous(count), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [Python(*arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=patience(60))
            assert rank in may_die or process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()


def train_together(count: int, *arguments: object) -> None:
    """`farflung train` of some processes, as under torchrun."""
    run_together(count, "-m", "farflung", "train", *arguments)


def run_replicas(
    replicas: int,
    case: str,
    argument: str,
    out: Path,
    may_die: frozenset[int] = frozenset(),
    script: str = "torch_replica.py",
) -> list[Any]:
    """Runs a script once a replica; what each observed, by rank (None for those that may die)."""
    run_together(replicas, HERE / script, case, argument, out, may_die=may_die)
    paths = [out / f"{rank}.pt" for rank in range(replicas)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def farflung(*arguments: object, timeout: float = 100, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line as a user would."""
    process = Python("-m", "farflung", *arguments, **environment)
    out, err = process.communicate(timeout=patience(timeout))
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def trained(tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> Path:
    """The folder of a run that is trained once, for several tests."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_here(monkeypatch, folder, "train", *arguments, "--out", "run") == 0
    return folder / "run"


def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The command in this process; its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["farflung", *arguments])
    try:
        cli.main()
    except SystemExit as exit:
        return int(exit.code or 0)
    return 0


def fill(disk: Path) -> Path:
    """Fills a disk to the last byte; the file that does."""
    filler = disk / "filler"
    with filler.open("ab", 0) as file, pytest.raises(OSError, match="No space"):
        while file.write(bytes(1 << 20)):
            pass
    return filler


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two models, of at least one tensor, are the same bit for bit."""
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_weights(one: Path, other: Path, step: int, replicas: Iterable[int] = (0, 1)) -> bool:
    """Whether the replicas of two runs had the same weights at a step."""
    return all(same(*(saved(folder, step, replica)["model"] for folder in (one, other))) for replica in replicas)


def saved(folder: Path, step: int, replica: int) -> dict[str, Any]:
    """A replica's checkpoint, of a run in which one process has all of it."""
    return checkpoint.read(checkpoint.path_of(folder, step, f"replica-{replica}"))
