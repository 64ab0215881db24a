"""Are the losses the same, whatever the stages and the schedule, and what memory does a process then take?
One replica, fixed routes, one seed, the baseline one process: a small model with every schedule over 2 and 4 stages,
then a model of 134 million parameters, embeddings and head of 32,000 tokens among them, with 1 and 4. Takes some ten
minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.lib.store import Settings, Store
from bench.lib.table import Cell, Part, Table
from bench.lib.training import save_llama, train
from farflung.events import StartEvent, StepEvent

SMALL = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 352}
LARGE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Options:
    steps: int = 20
    """Inner steps of the runs whose losses are compared."""
    schedules: tuple[str, ...] = SCHEDULES
    """Orders of passes to compare."""
    stages: tuple[int, ...] = (2, 4)
    """Stages of the runs whose losses are compared."""
    memory: bool = True
    """Whether to measure memory with the larger model, too."""


SMOKE = Options(steps=2, schedules=("1f1b",), stages=(2,), memory=False)


def run(options: Options, store: Store) -> Iterator[Part]:
    yield from losses(options, store)
    if options.memory:
        yield from memory(store)


def losses(options: Options, store: Store) -> Iterator[Part]:
    model = save_llama(store.scratch / "small", **SMALL, vocab_size=256, max_position_embeddings=128)
    common: Settings = {"model": model, "replicas": 1, "steps": options.steps, "log_every": 1, "eval_every": 10}
    common |= {"every": 5, "method": "diloco", "batch_size": 8, "checkpoint_every": 0}
    whole = train(store.scratch / "whole", **common)
    first, last = whole.losses[0], whole.losses[-1]
    yield f"{options.steps} steps of one replica in one process: loss {first:.6f} to {last:.6f}"

    def row(schedule: str, stages: int) -> tuple[Cell, ...]:
        settings: Settings = {"stages": stages, "pipeline_schedule": schedule, "microbatches": 4}
        run = train(store.scratch / f"{schedule}-{stages}", **common, **settings)
        apart = max(abs(a - b) for a, b in zip(run.losses, whole.losses, strict=True))
        validation = abs(run.summary["validation_loss"] - whole.summary["validation_loss"])
        return schedule, stages, apart, validation

    columns = {"schedule": "", "stages": "d", "largest difference of a loss": ".1e", "of the validation loss": ".1e"}
    yield Table(columns, (row(schedule, stages) for schedule in options.schedules for stages in options.stages))


def memory(store: Store) -> Iterator[Part]:
    model = save_llama(store.scratch / "large", **LARGE, vocab_size=32_000, max_position_embeddings=128)
    common: Settings = {"model": model, "replicas": 1, "steps": 4, "log_every": 1, "eval_every": 1000, "every": 2}
    common |= {"method": "diloco", "batch_size": 8, "sequence_length": 64, "eval_sequences": 8, "checkpoint_every": 0}
    most = {}

    def row(stages: int) -> tuple[Cell, ...]:
        run = train(store.scratch / f"memory-{stages}", **common, stages=stages)
        own = [events[0].own_parameters for events in run.processes(StartEvent)]
        peaks = [int(events[-1].peak_memory or 0) for events in run.processes(StepEvent)]
        most[stages] = max(peaks)
        return stages, " ".join(f"{n:,}" for n in own), " ".join(f"{peak / 1e6:,.0f}" for peak in peaks)

    columns = ("stages", "parameters of each process", "peak memory of each, MB (interpreter and all)")
    yield Table(dict.fromkeys(columns, ""), (row(stages) for stages in (1, 4)))
    yield f"the largest process of 4 stages takes {most[4] / most[1]:.1%} of the one that has everything"
