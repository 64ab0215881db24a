from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Hubs are not for tests; and one thread gives the same bits as the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import patience
import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from swarm import Swarm
    from test_internet import Run

    from farflung.testing.liars import Liar

torch.set_num_threads(1)
patience.measure()

# Tokens are made once, for all workers; and no test leaves any in a user's own cache.
CACHE = tempfile.TemporaryDirectory(prefix="farflung-tests-") if "FARFLUNG_CACHE" not in os.environ else None
if CACHE:
    os.environ["FARFLUNG_CACHE"] = CACHE.name

# Time is no part of any claim: a test of a busy machine says the same as one of an idle one.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    """One more than processors: in half of their time, workers wait for what they have started."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest comes first: else one worker may still have all of it when the others are done."""
    items.sort(key=lambda item: item.path.name != "test_bench.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Whatever the order of tests, each draws the same numbers, and so do the fixtures that it is the first to need."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    torch.manual_seed(0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests on the internet network, which mostly wait for beats."""
    monkeypatch.setattr("farflung.networks.internet.contact.gossip.BEAT_SECONDS", 0.5)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """Peers in processes of their own, which are there no longer than the test."""
    from swarm import Swarm  # which imports much, too, that most tests do not need

    made = Swarm(tmp_path)
    yield made
    for process in made.processes:
        process.kill()


@pytest.fixture
def liar(run: Run, tmp_path: Path) -> Iterator[Liar]:
    """One that knows a run's secret, and means it ill."""
    from farflung.testing.liars import Liar  # libp2p takes seconds, and most tests need none

    made = Liar(run.ticket, tmp_path / "liar.key", "s")
    yield made
    made.close()
