"""Mixtures for benches: a text split in several ways, each part a store, and what experts trained on these come to."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.lib.runs import Runs
from bench.lib.store import Result, Settings
from farflung.files import typed
from farflung.mixtures.corpus import Corpus
from farflung.workloads import store
from farflung.workloads.tokenizers import Bytes

Experts = NDArray[np.int64]


@dataclass(frozen=True)
class Division:
    """One way to divide a text: the stores of its parts, and how many sequences each is judged by."""

    stores: list[Path]
    held_out: list[int]

    @classmethod
    def write(cls, folder: Path, corpus: Corpus, experts: Experts, judges: Experts) -> Division:
        """Writes the parts: which expert trains on each sequence, and which is judged by each that is held out."""
        held_out = corpus.held_out()[0].numpy()
        count = int(max(experts.max(), judges.max())) + 1
        stores = [folder / f"expert-{number}" for number in range(count)]
        for number, where in enumerate(stores):
            if not store.is_store(where):
                rows = corpus.take(np.flatnonzero(experts == number)).numpy()
                store.write_sequences(where, [rows], held_out[judges == number], Bytes())
        return cls(stores, np.bincount(judges, minlength=count).tolist())


class Trained:
    """Runs on the parts of a division, each with its share of the steps of one model of all: equal work in all."""

    def __init__(self, runs: Runs, division: Division, settings: Settings, steps: int, seed: int) -> None:
        self._division = division
        self._each = steps // len(division.stores)
        own = {"steps": self._each, "eval_every": max(1, settings["eval_every"] // len(division.stores))}
        self._runs: list[Future[Result]] = [
            runs.start({**settings, **own, "data": str(typed(where))}, seed) for where in division.stores
        ]

    def losses(self) -> dict[int, float]:
        """Nats a token of all sequences held out, by the steps of all parts together."""
        found: list[Mapping[int, float]] = [
            {int(step): loss for step, loss in run.result()["losses"].items()} for run in self._runs
        ]
        weights = np.array(self._division.held_out) / sum(self._division.held_out)
        return {
            step * len(found): float(sum(weight * one[step] for weight, one in zip(weights, found, strict=True)))
            for step in sorted(found[0])
        }

    def loss(self) -> float:
        """At the end."""
        losses = self.losses()
        return losses[max(losses)]
