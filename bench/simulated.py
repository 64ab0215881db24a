"""Simulated training runs for tables of losses: as many at a time as there are cores, each made only once.

With AdamW where settings do not say, which the figures in the README are of.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from types import TracebackType
from typing import Any, Self

from farflung.settings import Settings
from farflung.training import checkpoint, launch

Summary = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Variant:
    """One row of a table: a method with settings."""

    name: str
    settings: dict[str, Any]

    def but(self, name: str, **settings: Any) -> Variant:
        """The same with other settings."""
        return Variant(name, self.settings | settings)


class Runs:
    """Starts runs with common settings; a run whose summary lies in `out` is not made again."""

    def __init__(self, out: Path, **common: Any) -> None:
        self._out = out
        self._common = common
        self._pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))
        self._started: dict[Path, Future[Summary]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, variant: Variant, seed: int) -> Future[Summary]:
        """One run's summary, in time."""
        settings = {"inner": "adamw"} | self._common | variant.settings
        short = "-".join(f"{key}={value}" for key, value in sorted(variant.settings.items()) if key != "method")
        folder = self._out / f"{settings['method']}-{short}-{settings['steps']}-seed{seed}"
        if folder not in self._started:
            config = Settings.of(**settings, seed=seed, network="simulated", checkpoint_every=0, out=str(folder))
            self._started[folder] = self._pool.submit(run, config)
        return self._started[folder]

    def start_all(self, variant: Variant, seeds: tuple[int, ...]) -> list[Future[Summary]]:
        """One run for each seed."""
        return [self.start(variant, seed) for seed in seeds]

    def best(self, candidates: list[Variant], seed: int) -> Variant:
        """The candidate with the lowest loss on one seed; prints them all."""
        started = [(variant, self.start(variant, seed)) for variant in candidates]
        losses = {variant.name: future.result()["validation_loss"] for variant, future in started}
        best = min(candidates, key=lambda variant: losses[variant.name])
        print(
            f"  tuned on seed {seed}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()), flush=True
        )
        return best


def run(config: Settings) -> Summary:
    """Makes a run unless it lies there; one that was broken off goes on."""
    folder = Path(config.run.out)
    summary = folder / "summary.json"
    if not summary.exists():
        goes_on = bool(checkpoint.whole_steps(folder))
        launch.prepare(config, folder, resume=goes_on, restart=not goes_on)
        launch.run_simulated(config, folder, resume=goes_on)
    result: Summary = json.loads(summary.read_text())
    return result


def losses(futures: list[Future[Summary]]) -> list[float]:
    """The validation losses, by seed."""
    return [future.result()["validation_loss"] for future in futures]


def bytes_sent(futures: list[Future[Summary]]) -> float:
    """What all replicas together sent, the mean of the runs."""
    return mean(future.result()["bytes_sent"] for future in futures)


def row(name: str, futures: list[Future[Summary]], baseline: list[Future[Summary]]) -> str:
    """A line of a table: loss, how it differs from the baseline's seed by seed, and how many times fewer bytes."""
    own, theirs = losses(futures), losses(baseline)
    changes = [100 * (mine / other - 1) for mine, other in zip(own, theirs, strict=True)]
    error = stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    fewer = bytes_sent(baseline) / max(bytes_sent(futures), 1)
    each = " ".join(f"{loss:.4f}" for loss in own)
    return (
        f"{name:44} {mean(own):7.4f} {mean(changes):+7.2f} % +- {error:4.2f}  {each}  "
        f"{bytes_sent(futures) / 1e6:8.1f} MB {fewer:6.1f}x"
    )
