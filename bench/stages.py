"""The same losses, whatever the stages and the schedule; and what memory a process then takes.

    python bench/stages.py [--steps 20] [--out runs/bench-stages]

One replica, fixed routes, one seed. The first table trains a small model with every schedule over 1, 2 and 4 stages;
the second a model of 134 million parameters, embeddings and head of 32,000 tokens among them, with 1 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from real import Finished, save_llama, train

from farflung.events import StartEvent, StepEvent

SMALL = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 352}
LARGE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


@dataclass(frozen=True)
class Options:
    steps: int = 20
    """Inner steps of the runs whose losses are compared."""
    out: Path = Path("runs/bench-stages")
    """Where the run folders go."""


def losses(options: Options) -> None:
    model = save_llama(options.out / "small", **SMALL, vocab_size=256, max_position_embeddings=128)
    common = {"model": model, "replicas": 1, "steps": options.steps, "log_every": 1, "eval_every": 10, "every": 5}
    common |= {"method": "diloco", "batch_size": 8, "checkpoint_every": 0}
    whole = train(options.out / "whole", **common)
    print(
        f"{options.steps} steps of one replica in one process: loss {whole.losses[0]:.6f} to {whole.losses[-1]:.6f}\n"
    )
    print(f"{'schedule':12} {'stages':>6} {'largest difference of a loss':>30} {'of the validation loss':>23}")
    for schedule in SCHEDULES:
        for stages in (2, 4):
            settings = {"stages": stages, "schedule": schedule, "microbatches": 4}
            run = train(options.out / f"{schedule}-{stages}", **common, **settings)
            apart = max(abs(a - b) for a, b in zip(run.losses, whole.losses, strict=True))
            validation = abs(run.summary["validation_loss"] - whole.summary["validation_loss"])
            print(f"{schedule:12} {stages:6} {apart:30.1e} {validation:23.1e}", flush=True)


def memory(options: Options) -> None:
    model = save_llama(options.out / "large", **LARGE, vocab_size=32_000, max_position_embeddings=128)
    common = {"model": model, "replicas": 1, "steps": 4, "log_every": 1, "eval_every": 1000, "every": 2}
    common |= {"method": "diloco", "batch_size": 8, "sequence_length": 64, "eval_sequences": 8, "checkpoint_every": 0}

    def peaks(run: Finished) -> list[int]:
        return [int(events[-1].peak_memory or 0) for events in run.processes(StepEvent)]

    print(f"\n{'stages':>6} {'parameters of each process':>46} {'peak memory of each, MB (interpreter and all)':>48}")
    most = {}
    for stages in (1, 4):
        run = train(options.out / f"memory-{stages}", **common, stages=stages)
        own = [events[0].own_parameters for events in run.processes(StartEvent)]
        most[stages] = max(peaks(run))
        print(
            f"{stages:6} {' '.join(f'{n:,}' for n in own):>46} {' '.join(f'{p / 1e6:,.0f}' for p in peaks(run)):>48}",
            flush=True,
        )
    print(f"the largest process of 4 stages takes {most[4] / most[1]:.1%} of the one that has everything")


def main(options: Options) -> None:
    losses(options)
    memory(options)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
