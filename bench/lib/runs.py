"""The training runs of one bench: as many at a time as there are cores, each made only once."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, stdev
from types import TracebackType
from typing import Any, Self, TypeVar

from bench.lib.store import Result, Settings, Store
from bench.lib.training import outcome

K = TypeVar("K")

PLACE = "model", "steps", "replicas", "batch_size", "sequence_length"


def told_by(options: Any, *more: str) -> Settings:
    """The settings in a bench's options, under the same names."""
    return {name: getattr(options, name) for name in (*PLACE, *more)}


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


class Runs:
    """Runs with `common` settings, kept in a store; `seed` is given with each. `make` makes one, in its own process."""

    def __init__(self, store: Store, common: Settings, make: Callable[[Settings, int], Result] = outcome) -> None:
        self.store = store
        self._common = common
        self._make = make
        self._lock = threading.RLock()  # a run that has ended at once is kept while it is being started
        self._futures: dict[str, Future[Result]] = {}

    def __enter__(self) -> Self:
        # A fork has what this process has imported; it is made here, before there are threads.
        way = "fork" if sys.platform == "linux" else "spawn"
        self._pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context(way))
        self._pool.submit(int).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, settings: Settings, seed: int) -> Future[Result]:
        """One run's result, in time. A run that diverges has the loss None."""
        everything = self._common | settings
        key = repr((sorted(everything.items()), seed))
        with self._lock:
            if key not in self._futures:
                kept = self.store.results(everything)
                if seed in kept:
                    self._futures[key] = Future()
                    self._futures[key].set_result(kept[seed])
                else:
                    self._futures[key] = self._pool.submit(self._make, everything, seed)
                    self._futures[key].add_done_callback(lambda future: self._keep(everything, seed, future))
            return self._futures[key]

    def start_all(self, settings: Settings, seeds: Iterable[int]) -> list[Future[Result]]:
        """One run for each seed."""
        return [self.start(settings, seed) for seed in seeds]

    def results(self, settings: Settings) -> dict[int, Result]:
        """What there is of these settings, by seed; nothing is made."""
        return self.store.results(self._common | settings)

    def loss(self, settings: Settings, seed: int, which: str = "validation_loss") -> float:
        """A run's validation loss, waited for; infinite where it diverged."""
        loss = self.start(settings, seed).result().get(which)
        return float("inf") if loss is None else float(loss)

    def on_seeds(self, settings: Settings, seeds: Iterable[int]) -> dict[int, Result]:
        """One run for each seed, waited for, by seed."""
        seeds = list(seeds)
        return dict(zip(seeds, [future.result() for future in self.start_all(settings, seeds)], strict=True))

    def best_of_each(self, grids: dict[K, dict[str, Settings]], seed: int) -> dict[K, str]:
        """The best of each grid, see `best`; the runs of all are made at once."""
        for settings in (settings for grid in grids.values() for settings in grid.values()):
            self.start(settings, seed)
        return {key: self.best(grid, seed) for key, grid in grids.items()}

    def best(self, candidates: dict[str, Settings], seed: int) -> str:
        """The name of the candidate with the lowest loss on one seed; all are made at once."""
        for settings in candidates.values():
            self.start(settings, seed)
        return min(candidates, key=lambda name: self.loss(candidates[name], seed))

    def _keep(self, settings: Settings, seed: int, future: Future[Result]) -> None:
        if future.cancelled() or future.exception():
            return
        result = future.result()
        self.store.keep(settings, seed, result)
        print(f"{time.strftime('%H:%M:%S')} {next(iter(result.values()))}  seed {seed}  {settings}", flush=True)


def sound(results: dict[int, Result]) -> dict[int, Result]:
    """Those that have not diverged."""
    return {seed: one for seed, one in results.items() if one["validation_loss"]}


def around(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """Mean and deviation."""
    values = list(values)
    deviation = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.{digits}f}{deviation}"


def changes(own: dict[int, Result], base: dict[int, Result]) -> list[float]:
    """By how many per cent the loss differs, seed by seed."""
    seeds = sorted(own.keys() & base.keys())
    return [100 * (own[seed]["validation_loss"] / base[seed]["validation_loss"] - 1) for seed in seeds]


def in_words(settings: Settings, left_out: Iterable[str] = ()) -> str:
    """Settings as words, in one order."""
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in settings.items()
        if key not in left_out
    )
