"""The recipe for Slurm: what its tasks do, with the variables that srun would give them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import patience, until
from processes import farflung

import farflung as package
from farflung.events import JoinedEvent, RoundEvent, StartEvent, StepEvent
from farflung.report.read import E, Run
from farflung.training import checkpoint

ROOT = Path(package.__file__).parents[1]
SETTINGS = [
    *("--model", "micro", "--every", "10", "--batch-size", "2", "--sequence-length", "32", "--eval-sequences", "4"),
    *("--eval-every", "50", "--log-every", "1", "--checkpoint-every", "10", "--max-tokens", "200000"),
    *("--steps", "100000"),
]
TASKS = range(3)


class Job:
    """A job's tasks on this machine, which share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "shared run"
        (bin := folder / "bin").mkdir()
        (bin / "farflung").write_text(f'#!/bin/sh\nexec {sys.executable} -m farflung "$@"\n')
        (bin / "farflung").chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.tasks: list[subprocess.Popen[bytes]] = []
        self._read = Run(self.run)

    def start(self) -> None:
        command = [ROOT / "docs" / "how-to" / "slurm-replica.sh", self.run, *SETTINGS, "--deadline", str(patience(15))]
        for task in TASKS:
            its = {"SLURM_PROCID": str(task), "SLURMD_NODENAME": "localhost", "SLURM_CPUS_PER_TASK": "1"}
            with (self.folder / f"{task}.log").open("ab") as log:
                environment = {**self._environment, **its}
                self.tasks.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )

    def replica(self, task: int) -> int:
        """The process of a task's replica; 0 while there is none."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if str(self.run / f"replica-{task}").encode() in words and b"-m" in words:
                    return int(path.parent.name)
        return 0

    def events(self, task: int, kind: type[E]) -> list[E]:
        self._read.refresh()
        return self._read.of(task, kind)

    def step(self, task: int) -> int:
        return max((event.step for event in self.events(task, StepEvent)), default=0)

    def meet(self, task: int) -> bool:
        """Whether a replica has averaged since it was started last."""
        rounds, starts = self.events(task, RoundEvent), self.events(task, StartEvent)
        return any(event.outcome == "averaged" and event.started > starts[-1].at for event in rounds)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for task in made.tasks:
        task.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(task.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_jobs_replicas_meet_come_back_when_killed_and_go_on_when_the_job_is_started_again(job: Job) -> None:
    job.start()
    until(lambda: all(job.meet(task) for task in TASKS), 120)
    before = job.step(1)
    os.kill(job.replica(0), signal.SIGKILL)  # the one that has begun the run
    until(lambda: job.events(0, JoinedEvent) and job.meet(0), 120)
    assert len(job.events(1, StartEvent)) == 1 and job.step(1) > before

    for task in job.tasks:
        task.send_signal(signal.SIGTERM)
    assert [task.wait(patience(60)) for task in job.tasks] == [130, 130, 130]
    reached = [checkpoint.whole_steps(job.run / f"replica-{task}")[0] for task in TASKS]
    assert not any(job.replica(task) for task in TASKS) and min(reached) > before

    job.tasks.clear()
    job.start()
    until(lambda: all(job.meet(task) and job.step(task) > max(reached) for task in TASKS), 120)
    assert farflung("report", job.run).returncode == 0
    looked = farflung("status", job.run / "replica-0", "--once", "--listen", "127.0.0.1")
    assert "3 peers in training" in looked.stdout, looked
