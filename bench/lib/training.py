"""Training runs for benches: simulated, or `farflung train` as a user would start it; and what they come to."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.store import Result, Settings
from farflung import settings as run_settings
from farflung.events import EvaluationEvent, StepEvent
from farflung.outer import DivergedError
from farflung.report.read import E, Run, mean, read_run
from farflung.training import launch

KEPT = (
    *("weight_spread", "bytes_sent", "ddp_bytes", "rounds", "tokens", "parameters"),
    *("seconds", "seconds_blocked"),
)
"""What is kept of a run's summary, besides the figure that it is judged by."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    run: Run

    @property
    def losses(self) -> list[float]:
        """Replica 0's training losses, one for each line of its events; NaN where it was not finite."""
        return [math.nan if event.loss is None else event.loss for event in self.run.of(0, StepEvent)]

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas together, the median over the run without its beginning."""
        steps = self.run.by_step(StepEvent)
        rates = [sum(event.tokens_per_second for event in events) for events in steps.values()]
        return median(rates[len(rates) // 4 :])

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary."""
        assert self.run.summary is not None
        return self.run.summary

    def processes(self, kind: type[E]) -> list[list[E]]:
        """Each process's events of one kind."""
        everything = [*self.run.events.values(), *self.run.parts.values()]
        return [[event for event in events if isinstance(event, kind)] for events in everything]


def outcome(settings: Settings, seed: int) -> Result:
    """Makes a run, and returns what is kept of it; its loss is None if it diverged.

    Simulated, but for pipelines, which need real processes. `losses` are the replicas' mean figures, by step.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name) / "run", time.time()
        everything = settings | {"seed": seed, "checkpoint_every": 0}
        try:
            run = (train if "stages" in settings else simulate)(folder, **everything)
        except DivergedError:
            return {"validation_loss": None}
        losses = {
            step: mean([event.score for event in events]) for step, events in run.run.by_step(EvaluationEvent).items()
        }
        judged_by = run.run.figure.key
        kept = {key: run.summary.get(key) for key in (judged_by, f"{judged_by}_averaged", *KEPT)}
        return {**kept, "losses": losses, "wall_seconds": round(time.time() - began, 1)}


def simulate(folder: Path, **settings: Any) -> Finished:
    """All replicas in this process, on the simulated network."""
    config = run_settings.Settings.of(**settings, network="simulated", out=str(folder))
    launch.prepare(config, folder, resume=False, restart=True)
    launch.run_simulated(config, folder, resume=False)
    return Finished(read_run(folder))


def train(folder: Path, threads: int = 1, timeout_s: float = 2400, data_limit: int = 0, **settings: Any) -> Finished:
    """Real processes, each of which may take `data_limit` bytes for data; 0 for any.

    Raises RuntimeError with the end of their complaint.
    """
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "farflung", "train", "--out", str(folder), *flags(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    limited = partial(resource.setrlimit, resource.RLIMIT_DATA, (data_limit, data_limit)) if data_limit else None
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment, preexec_fn=limited
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-1000:]}")
    return Finished(read_run(folder))


def flags(settings: Settings) -> list[str]:
    """Settings as the command line takes them; with AdamW where they do not say, which the older figures are of."""
    words = []
    for key, value in {"inner": "adamw", **settings}.items():
        words += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def save_llama(folder: Path, **settings: Any) -> str:
    """A folder that AutoConfig loads a Llama configuration from; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | settings))
    return str(folder)
