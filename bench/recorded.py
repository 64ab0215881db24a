"""Training runs whose results are kept in one JSON file a table, written run by run; a run in it is not made again."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import simulated
from real import train

from farflung import settings as run_settings
from farflung.events import EvaluationEvent
from farflung.files import write_text
from farflung.outer import DivergedError
from farflung.report.read import read_run

RESULTS = Path(__file__).parent / "results"

Settings = dict[str, Any]
Result = dict[str, Any]
"""What a run came to: see `outcome`."""

KEPT = (
    *("validation_loss", "validation_loss_averaged", "weight_spread", "bytes_sent", "ddp_bytes"),
    *("rounds", "tokens", "parameters", "seconds", "seconds_blocked"),
)
"""What is kept of a run's summary."""


def regime(steps: int, model: str = "micro", replicas: int = 8) -> Settings:
    """What the tables of evidence have in common, unless they are about it."""
    return {
        "model": model,
        "steps": steps,
        "replicas": replicas,
        "batch_size": 8,
        "sequence_length": 32,
        "max_tokens": 4_000_000,
        "eval_sequences": 128,
        "eval_every": steps,
        "log_every": steps,
    }


class Recorded:
    """The runs of one table, made as many at a time as there are cores, or found in its file.

    Args:
        table: names the file, `bench/results/TABLE.json`.
        common: settings of all runs; `seed` is given with each.
    """

    def __init__(self, table: str, common: Settings, results: Path = RESULTS) -> None:
        self.path = results / f"{table}.json"
        self._common = common
        self._lock = threading.RLock()  # a run that has ended at once is kept while it is being started
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[str, Future[Result]] = {}
        kept: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self._runs: list[dict[str, Any]] = kept.get("runs", [])
        self.chosen: dict[str, Settings] = kept.get("chosen", {})
        for run in self._runs:
            done: Future[Result] = Future()
            done.set_result(run["result"])
            self._futures[_key(run["settings"], run["seed"])] = done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def start(self, settings: Settings, seed: int) -> Future[Result]:
        """One run's result, in time. A run that diverges has the loss None."""
        everything = self._common | settings
        key = _key(everything, seed)
        with self._lock:
            if key not in self._futures:
                self._pool = self._pool or ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
                self._futures[key] = self._pool.submit(outcome, everything, seed)
                self._futures[key].add_done_callback(lambda future: self._keep(everything, seed, future))
            return self._futures[key]

    def chosen_as(self, name: str) -> Settings:
        """What a search has found for a row. Raises SystemExit if it has not been made."""
        if name not in self.chosen:
            raise SystemExit(f"{self.path} has no tuned {name!r} yet; make it first (see bench/README.md)")
        return self.chosen[name]

    def start_all(self, settings: Settings, seeds: Iterable[int]) -> list[Future[Result]]:
        """One run for each seed."""
        return [self.start(settings, seed) for seed in seeds]

    def results(self, settings: Settings) -> dict[int, Result]:
        """What there is of these settings, by seed; nothing is made."""
        wanted = self._common | settings
        return {run["seed"]: run["result"] for run in self._runs if run["settings"] == wanted}

    def made_on(self) -> list[str]:
        """Machines and versions that its runs are from."""
        names = (
            f"{run['machine']}; " + ", ".join(f"{name} {version}" for name, version in run["versions"].items())
            for run in self._runs
        )
        return list(dict.fromkeys(names))

    def loss(self, settings: Settings, seed: int, which: str = "validation_loss") -> float:
        """A run's validation loss, waited for; infinite where it diverged."""
        loss = self.start(settings, seed).result().get(which)
        return float("inf") if loss is None else float(loss)

    def choose(self, name: str, settings: Settings) -> None:
        """Notes what a search has found for a row."""
        with self._lock:
            self.chosen[name] = settings
            self._write()

    def _keep(self, settings: Settings, seed: int, future: Future[Result]) -> None:
        if future.cancelled() or future.exception():
            return
        result = future.result()
        with self._lock:
            self._runs.append({"settings": settings, "seed": seed, "result": result, **SURROUNDINGS})
            self._write()
        print(f"{time.strftime('%H:%M:%S')} {result['validation_loss']}  seed {seed}  {settings}", flush=True)

    def _write(self) -> None:
        write_runs(self.path, self._runs, f'"chosen": {json.dumps(self.chosen, indent=1)},\n')


def write_runs(path: Path, runs: list[dict[str, Any]], before: str = "") -> None:
    """Runs as JSON, one a line, so that what a later bench adds is seen as what it is; `before` comes before them."""
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(run) for run in runs)
    write_text(path, f'{{{before}"runs": [\n{lines}\n]}}\n')


def outcome(settings: Settings, seed: int) -> Result:
    """Makes a run, and returns what is kept of it; its loss is None if it diverged.

    Simulated, but for pipelines, which need real processes. `losses` are the replicas' mean validation losses, by step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name) / "run", time.time()
        everything = settings | {"seed": seed, "checkpoint_every": 0}
        try:
            if "stages" in settings:
                summary = train(folder, **everything).summary
            else:
                summary = simulated.run(run_settings.Settings.of(**everything, network="simulated", out=str(folder)))
        except DivergedError:
            return {"validation_loss": None}
        evaluations = read_run(folder).by_step(EvaluationEvent)
        losses = {
            step: sum(event.validation_loss for event in events) / len(events) for step, events in evaluations.items()
        }
        kept = {key: summary[key] for key in KEPT}
        return {**kept, "losses": losses, "wall_seconds": round(time.time() - began, 1)}


def _key(settings: Settings, seed: int) -> str:
    return json.dumps([settings, seed], sort_keys=True)


def _surroundings() -> dict[str, Any]:
    """Versions and machine."""
    here = Path(__file__).parent
    ask = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(ask, cwd=here, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    packages = {name: version(name) for name in ("torch", "transformers")}
    names = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = names[0].partition(": ")[2] if names else platform.processor()
    return {
        "versions": {"farflung": commit, "python": platform.python_version(), **packages},
        "machine": f"{os.cpu_count()} cores of {processor}, {platform.system()}",
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


SURROUNDINGS = _surroundings()
