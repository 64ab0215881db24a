"""What do compressed and overlapped methods lose against DiLoCo and NoLoCo, and how many bytes do they save?
At equal tokens, seed by seed, each family beside its uncompressed baseline; outer learning rate and momentum of each
method are the best of one grid on the first seed. Takes some hours on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, stdev

from bench.lib.runs import Runs, changes, told_by
from bench.lib.store import Result, Settings, Store
from bench.lib.table import Cell, Part, Table

FAMILIES = ("diloco", "noloco")


@dataclass(frozen=True)
class Options:
    families: tuple[str, ...] = FAMILIES
    """Which tables to make."""
    steps: int = 600
    """Inner steps of each replica."""
    every: int = 5
    """Inner steps between rounds: few, so that a short run has enough rounds for error feedback to catch up."""
    replicas: int = 8
    """Copies of the model."""
    model: str = "micro"
    """What is trained."""
    batch_size: int = 4
    """Sequences in an inner step."""
    sequence_length: int = 64
    """Tokens in a sequence."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run of each row for each; tuning uses the first."""
    grid: tuple[tuple[float, float], ...] = ((1.0, 0.0), (0.7, 0.3), (0.7, 0.0))
    """Outer learning rates and momenta to tune over."""


SMOKE = Options(families=("noloco",), steps=2, every=1, replicas=2, seeds=(0,), grid=((0.7, 0.3),))

RANK, SPARSE = "lowrank18-int4", "topk1.1-int2"
"""At rank 18, a micro model's packets are about a sixteenth of its float32 messages."""

Rows = dict[str, Settings]
"""Settings by the names of rows; the first row is the baseline."""


def tuned(runs: Runs, options: Options, searches: Rows) -> dict[str, tuple[str, Settings]]:
    """For each method the best of the grid, and its name with what was found."""
    grids = {
        name: {
            f"{name}, lr {lr:g} momentum {momentum:g}": {**settings, "outer_lr": lr, "outer_momentum": momentum}
            for lr, momentum in options.grid
        }
        for name, settings in searches.items()
    }
    best = runs.best_of_each(grids, options.seeds[0])
    return {name: (best[name], grids[name][best[name]]) for name in searches}


def diloco_rows(runs: Runs, options: Options) -> Rows:
    """DiLoCo's family."""
    searches: Rows = {
        "diloco": {"method": "diloco"},
        "diloco compressed": {"method": "diloco", "codec": f"ef-{RANK}"},
        "dilocox": {"method": "dilocox", "codec": f"ef-{RANK}", "adapt": False},
        "streaming-diloco": {"method": "streaming-diloco", "fragments": 2, "delay": 1, "merge": "kept"},
    }
    best = tuned(runs, options, searches)
    streaming = best["streaming-diloco"][1]
    return {
        **dict([best["diloco"], best["streaming-diloco"]]),
        "streaming-diloco, mixed half and half": {**streaming, "merge": "mixed"},
        **dict([best["diloco compressed"]]),
        "diloco compressed, without error feedback": {**best["diloco compressed"][1], "codec": RANK},
        **dict([best["dilocox"]]),
        "dilocox, without error feedback": {**best["dilocox"][1], "codec": RANK},
        "sparseloco 1.1 %": {"method": "sparseloco", "codec": f"ef-{SPARSE}"},
        "sparseloco 1.1 %, without error feedback": {"method": "sparseloco", "codec": SPARSE},
    }


def noloco_rows(runs: Runs, options: Options) -> Rows:
    """NoLoCo's family."""
    searches: Rows = {
        "noloco": {"method": "noloco"},
        "nolocox": {"method": "nolocox", "codec": "modulo3x2", "adapt": False},
    }
    best = tuned(runs, options, searches)
    return {
        **dict([best["noloco"]]),
        "noloco, modulo4": {**best["noloco"][1], "codec": "modulo4"},
        "noloco, modulo3": {**best["noloco"][1], "codec": "modulo3"},
        "nolocox's delay alone": {**best["nolocox"][1], "codec": "float32"},
        **dict([best["nolocox"]]),
    }


def run(options: Options, store: Store) -> Iterator[Part]:
    common = {"inner": "adamw", "max_tokens": 2_000_000, "eval_sequences": 128, "log_every": 50}
    common |= {**told_by(options, "every"), "eval_every": options.steps}
    columns = {"method": "", "loss": ".4f", "change, %": "+.2f", "+-": ".2f"}
    columns |= {f"seed {seed}": ".4f" for seed in options.seeds} | {"all sent, MB": ".1f", "times fewer": ".1f"}
    about = f"{options.replicas} replicas, every={options.every}, {options.steps} steps, {options.model}, stdlib text"
    with Runs(store, common) as runs:
        for family in options.families:
            rows = (diloco_rows if family == "diloco" else noloco_rows)(runs, options)
            for settings in rows.values():
                runs.start_all(settings, options.seeds)
            found = {name: runs.on_seeds(settings, options.seeds) for name, settings in rows.items()}
            baseline = next(iter(found.values()))
            lines = [row(name, results, baseline) for name, results in found.items()]
            yield Table(columns, lines, f"{family}: {about}")


def row(name: str, own: dict[int, Result], baseline: dict[int, Result]) -> tuple[Cell, ...]:
    """Loss, how it differs from the baseline's seed by seed, and how many times fewer bytes."""
    losses = [result["validation_loss"] for result in own.values()]
    change = changes(own, baseline)
    error = stdev(change) / len(change) ** 0.5 if len(change) > 1 else 0.0
    sent, theirs = (mean(result["bytes_sent"] for result in each.values()) for each in (own, baseline))
    return name, mean(losses), mean(change), error, *losses, sent / 1e6, theirs / max(sent, 1)
