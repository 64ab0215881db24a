"""Runs whose replicas can be killed and come back, of farflung and of torchft, on this machine's loopback."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.environments import python_of
from bench.lib.store import ROOT
from farflung.events import StepEvent
from farflung.report.read import Run
from farflung.testing.hosts import LOOPBACK, Process, free_port, processes_of

TIMEOUT_S = 120.0
"""How long processes may take to end."""


@dataclass(frozen=True)
class Standing:
    """How far a run is: its furthest replica's step, and the tokens of each replica that count."""

    step: int
    tokens: tuple[int, ...]


class Mortals(ABC):
    """A run of some replicas, each a process; `settings` are farflung's, by name, and have `replicas` and `steps`."""

    def __init__(self, folder: Path, settings: dict[str, Any], step_ms: float) -> None:
        self.folder, self.settings, self.step_ms = folder, settings, step_ms

    @abstractmethod
    def living(self) -> list[int]:
        """The replicas' processes."""

    @abstractmethod
    def standing(self) -> Standing:
        """How far it is."""

    @abstractmethod
    def tend(self) -> None:
        """Starts again what has died, unless the run does so itself."""

    @abstractmethod
    def loss(self) -> float:
        """The mean validation loss of those that came to the end, once all have ended. Raises TimeoutExpired."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all."""

    def kill(self, chance: random.Random) -> None:
        """As a power failure would."""
        if living := self.living():
            subprocess.run(["kill", "-9", str(chance.choice(living))], check=False)


class Ours(Mortals):
    """`farflung train --independent`, which starts its replicas again itself."""

    def __init__(self, folder: Path, settings: dict[str, Any], step_ms: float) -> None:
        super().__init__(folder, settings, step_ms)
        self._run = Run(folder / "run")
        given = {**settings, "out": self._run.folder, "restarts": 1000, "checkpoint_every": 5, "log_every": 5}
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "bench.lib.independent", str(step_ms), *flags]
        with (folder / "log").open("w") as log:
            self._launcher = LOOPBACK.popen(command, {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, cwd=ROOT)

    def living(self) -> list[int]:
        return processes_of(self._run.folder)

    def standing(self) -> Standing:
        self._run.refresh()
        last = [steps[-1] for replica in self._run.replicas if (steps := self._run.of(replica, StepEvent))]
        return Standing(max((step.step for step in last), default=0), tuple(step.tokens for step in last))

    def tend(self) -> None:
        if self._launcher.poll():
            raise RuntimeError(f"the run has failed; see {self.folder}/log")

    def loss(self) -> float:
        self._launcher.wait(TIMEOUT_S)
        self.tend()
        return float(json.loads((self._run.folder / "summary.json").read_text())["validation_loss"])

    def stop(self) -> None:
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            self._launcher.wait(TIMEOUT_S)


class Torchft(Mortals):
    """torchft's DiLoCo under its lighthouse; replicas that die are started again at once."""

    def __init__(self, folder: Path, settings: dict[str, Any], step_ms: float) -> None:
        super().__init__(folder, settings, step_ms)
        self._python, port = python_of("torchft"), free_port()
        lighthouse = Path(self._python).with_name("torchft_lighthouse")
        least = str(settings["replicas"] // 2)
        how = ["--bind", f"127.0.0.1:{port}", "--min_replicas", least, "--join_timeout_ms", "30000"]
        self._log = (folder / "log").open("w")
        self._lighthouse = LOOPBACK.popen([str(lighthouse), *how], stdout=self._log, stderr=self._log)
        self._address = f"http://127.0.0.1:{port}"
        self._replicas = [self._started(number) for number in range(settings["replicas"])]

    def _started(self, number: int) -> Process:
        passed = {name: value for name, value in self.settings.items() if name not in ("replicas", "method")}
        arguments = [str(number), self._address, str(self.step_ms), json.dumps(passed), str(self.folder)]
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [self._python, "-m", "bench.lib.torchft_replica", *arguments]
        return LOOPBACK.popen(command, environment, stdout=self._log, stderr=self._log)

    def living(self) -> list[int]:
        return [process.pid for process in self._replicas if process.poll() is None]

    def _told(self) -> list[dict[str, Any]]:
        paths = [self.folder / f"{number}.json" for number in range(len(self._replicas))]
        return [json.loads(path.read_text()) for path in paths if path.exists()]

    def standing(self) -> Standing:
        told = self._told()
        return Standing(max((one["step"] for one in told), default=0), tuple(one["tokens"] for one in told))

    def tend(self) -> None:
        for number, process in enumerate(self._replicas):
            if process.poll() and self.standing().step < self.settings["steps"]:
                self._replicas[number] = self._started(number)

    def loss(self) -> float:
        for process in self._replicas:
            try:
                process.wait(TIMEOUT_S / len(self._replicas))
            except subprocess.TimeoutExpired:
                process.kill()  # the others have left it
        losses: list[float] = [one["loss"] for one in self._told() if "loss" in one]
        return sum(losses) / len(losses)

    def stop(self) -> None:
        for process in (*self._replicas, self._lighthouse):
            process.kill()
            process.wait()
        self._log.close()


KINDS: dict[str, type[Mortals]] = {"farflung": Ours, "torchft": Torchft}


@contextmanager
def started(library: str, folder: Path, settings: dict[str, Any], step_ms: float) -> Iterator[Mortals]:
    """A new run in a folder; what was there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run = KINDS[library](folder, settings, step_ms)
    try:
        yield run
    finally:
        run.stop()
