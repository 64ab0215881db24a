"""How much memory does a replica take whose units are dealt out, beside DiLoCo's, which holds all of the model?
Real processes train a decoder whose layers are nearly all of it. What a process takes is its peak over the second half
of a run, less that of the same processes with a model of next to nothing; the baseline is DiLoCo. Takes three
minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.lib.store import Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import save_llama, train
from farflung.events import StepEvent

METHODS = ("diloco", "noloco", "ist", "resist")
LEAST = {"width": 64, "layers": 4}
"""A model of next to nothing."""


@dataclass(frozen=True)
class Options:
    replicas: int = 4
    """Processes."""
    width: int = 512
    """Of hidden states."""
    layers: int = 8
    """Of the decoder."""
    steps: int = 8
    """Inner steps."""
    every: int = 2
    """Inner steps between rounds."""


SMOKE = Options(replicas=2, width=128, layers=2, steps=4)


def run(options: Options, store: Store) -> Iterator[Part]:
    def peak(method: str, width: int, layers: int) -> tuple[float, int]:
        """MB of the largest process, and the model's parameters."""
        heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 16, "num_hidden_layers": layers}
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 256}
        model = save_llama(store.scratch / "model", **sizes, **heads, tie_word_embeddings=True)
        few: dict[str, Any] = {"batch_size": 1, "sequence_length": 16, "eval_sequences": 1, "max_tokens": 100_000}
        few |= {"log_every": 1, "eval_every": options.steps, "checkpoint_every": 0, "text_share": 0}
        shape = {"steps": options.steps, "every": options.every, "replicas": options.replicas}
        made = train(store.scratch / "run", network="torch", method=method, model=model, **few, **shape)
        late = [event for events in made.processes(StepEvent) for event in events if 2 * event.step > options.steps]
        return max(event.peak_memory or 0 for event in late) / 1e6, made.summary["parameters"]

    def row(method: str) -> tuple[Cell, ...]:
        (whole, parameters), (least, _) = peak(method, options.width, options.layers), peak(method, **LEAST)
        taken.append(whole - least)
        return method, parameters, whole, taken[-1], taken[-1] * 1e6 / parameters, taken[-1] / taken[0]

    taken: list[float] = []
    columns = {"": "", "parameters": ",.0f", "MB": ".0f", "of it for the model": ".0f", "bytes a parameter": ".1f"}
    yield Table(columns | {"ratio": ".2f"}, map(row, METHODS), f"{options.replicas} replicas")
