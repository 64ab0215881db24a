"""The largest Llama that trains in so much memory: by real runs, whose processes are held to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from bench.lib.store import Store
from bench.lib.table import Cell
from bench.lib.training import Finished, save_llama, train
from farflung.events import StepEvent

FEW = (2, 6)
"""Layers of the two models from which the largest is told."""

SHARE = 0.9
"""What of the memory a plan is given; what remains is for what a process takes beside what is near."""


class Models:
    """Llamas of one width and of many depths, trained for three steps in limited memory."""

    def __init__(self, gigabytes: float, width: int, tokens: int, store: Store) -> None:
        self._gigabytes, self._store = gigabytes, store
        self.memory = f"{SHARE * gigabytes:.4g}GB"
        self._sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 256}
        self._sizes |= {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
        self._layer = 4 * 16 * width**2  # bytes of its weights
        length = min(tokens, 512)
        self._sizes["max_position_embeddings"] = length
        self._settings: dict[str, Any] = {"method": "local", "replicas": 1, "network": "torch", "steps": 3}
        self._settings |= {
            "log_every": 1,
            "sequence_length": length,
            "batch_size": tokens // length,
            "eval_sequences": 1,
        }
        self._settings |= {"checkpoint_every": 0, "eval_every": 1000, "eval_sequences": 1, "text_share": 0}

    def train(self, layers: int, memory: str) -> Finished:
        """Trains one, without a plan where `memory` says nothing. Raises RuntimeError."""
        folder = self._store.scratch
        model = save_llama(folder / "llama", **self._sizes, num_hidden_layers=layers)
        planned: dict[str, Any] = {"memory": memory, "far_folder": folder / "far"} if memory else {}
        limit = int(self._gigabytes * 1e9)
        return train(folder / "run", timeout_s=7200, data_limit=limit, **self._settings, **planned, model=model)

    def needed(self, layers: int, planned: bool) -> float:
        """Gigabytes that it takes, or that it says it takes when it is given none."""
        if not planned:
            return peak_of(self.train(layers, ""))
        try:
            self.train(layers, "1MB")
        except RuntimeError as error:
            if found := re.search(r"give at least ([\d.]+) GB", str(error)):
                return float(found[1])
            raise
        raise RuntimeError("it was planned with 1 MB")

    def most(self, planned: bool) -> tuple[int, Finished]:
        """The most layers that train, and their run: as many as fewer say, or a little less."""
        one, other = (self.needed(layers, planned) for layers in FEW)
        each = (other - one) / (FEW[1] - FEW[0])
        each = max(each, self._layer / 1e9)  # since all of a model is near when it is made
        layers = FEW[0] + int(((SHARE if planned else 1) * self._gigabytes - one) / each)
        while layers:
            try:
                return layers, self.train(layers, self.memory if planned else "")
            except RuntimeError:
                layers -= max(1, layers // 10)
        raise RuntimeError(f"no layer of this width trains in {self._gigabytes:g} GB")

    def beyond(self, layers: int, planned: bool) -> str:
        """What becomes of one with a tenth more layers."""
        try:
            self.train(layers + max(1, layers // 10), self.memory if planned else "")
        except RuntimeError:
            return "does not train"
        return "trains, too"


def largest(gigabytes: float, width: int, tokens: int, store: Store) -> Iterator[tuple[Cell, ...]]:
    """Without a plan of memory, and with one."""
    models, without = Models(gigabytes, width, tokens, store), 0.0
    for planned in (False, True):
        layers, run = models.most(planned)
        parameters = run.summary["parameters"]
        without = without or parameters
        words = f"--memory {models.memory} --far-folder" if planned else "nothing"
        beyond, speed = models.beyond(layers, planned), run.run.of(0, StepEvent)[-1].tokens_per_second
        yield gigabytes, words, layers, parameters / 1e6, parameters / without, beyond, peak_of(run), tokens / speed


def peak_of(run: Finished) -> float:
    """Gigabytes."""
    return max(event.peak_memory or 0 for event in run.run.of(0, StepEvent)) / 1e9
