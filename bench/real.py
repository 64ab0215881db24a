"""Real training runs for tables: `farflung train` as a user would start it, and what its run folder then says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from farflung.events import StepEvent
from farflung.report.read import E, Run, read_run


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    run: Run

    @property
    def losses(self) -> list[float]:
        """Replica 0's training losses, one for each line of its events."""
        return [event.loss for event in self.run.of(0, StepEvent)]

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


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as the command line takes them; with AdamW where they do not say, which the older figures are of."""
    words = []
    for key, value in ({"inner": "adamw"} | settings).items():
        words += [f"--{key.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def train(folder: Path, threads: int = 1, timeout: float = 2400, **settings: Any) -> Finished:
    """Runs it, unless its summary lies in the folder already. Raises RuntimeError with the end of its complaint."""
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "farflung", "train", "--out", str(folder), *flags(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-1000:]}")
    return Finished(read_run(folder))


def save_llama(folder: Path, **settings: Any) -> str:
    """A folder that AutoConfig loads a Llama configuration from; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | settings))
    return str(folder)
